"""From files on disk to micro-batches.

1. `sources`   files on disk become `EditExample`s: names and paths, nothing opened
2. `geometry`  an image's size decides its transform; `images` reads it
3. `encoded`   what the encoders make of a sample
4. `cache`     the same, on disk, addressed by content (`store` writes whole files only)
5. `plan`      which samples train in which step
6. `batch`     the samples of one micro-batch with their noise and timestep
"""

from qflux.data.cache import EmbeddingCacheManager
from qflux.data.geometry import ImageProcessor
from qflux.data.plan import EpochPlan

__all__ = ["EmbeddingCacheManager", "EpochPlan", "ImageProcessor"]
