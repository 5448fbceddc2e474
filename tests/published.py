"""Tiny weights with the limits and settings of the published checkpoints: what only shows at real sizes shows here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qflux.models import get_family
from qflux.models.loading import save_checkpoint

QWEN_MOST_PIXELS = 12_845_056
"""`max_pixels` in `preprocessor_config.json` of the published Qwen-Image-Edit checkpoints."""


def published(name: str, seed: int = 0) -> Any:
    """Components of a family: tiny weights, and the image processor as it is published."""
    components = get_family(name).tiny(seed)
    if getattr(components, "processor", None) is not None:
        own = components.processor.image_processor
        components.processor.image_processor = Qwen2VLImageProcessorPil(
            min_pixels=3136,
            max_pixels=QWEN_MOST_PIXELS,
            **{name: getattr(own, name) for name in ("patch_size", "image_mean", "image_std")},
        )
    return components


def save_published(name: str, folder: Path, seed: int = 0) -> Path:
    """The same as a checkpoint on disk."""
    save_checkpoint(published(name, seed), folder, get_family(name).pipeline)
    return folder


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours and some noise: no two are alike, and resampling keeps them apart."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)
