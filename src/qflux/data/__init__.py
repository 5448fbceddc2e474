"""From files on disk to micro-batches.

1. `sources`   folders, tables and data sets list their samples: names and references, nothing opened
2. `images`    every image's header (`index`), and how it reaches its training size (`sizes`)
3. `dataset`   one `Sample` each: what trains, what is held out, what is wrong
4. `encoded`   what the encoders make of a sample; the cache room keeps it on disk
5. `plan`      which samples train in which step on which rank
6. `reader`    they are read ahead of the step
7. `batch`     the samples of one micro-batch with their noise and timestep
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qflux.cache.cache import EmbeddingCacheManager
    from qflux.data.images.sizes import ImageProcessor
    from qflux.data.plan import EpochPlan

__all__ = ["EmbeddingCacheManager", "EpochPlan", "ImageProcessor"]

_HOMES = {
    "EmbeddingCacheManager": "qflux.cache.cache",
    "EpochPlan": "qflux.data.plan",
    "ImageProcessor": "qflux.data.images.sizes",
}


def __getattr__(name: str) -> Any:
    """Public names on first use: whoever lists a folder of pictures should not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'qflux.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
