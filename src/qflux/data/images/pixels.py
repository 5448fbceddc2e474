"""Images as tensors, and back."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def to_pixels(image: Image.Image) -> Tensor:
    """An RGB image as `(3, H, W)` float32 in [-1, 1], an RGBA image as `(4, H, W)`."""
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255.0 * 2.0 - 1.0


def to_image(pixels: Tensor) -> Image.Image:
    """Pixels `(3, H, W)` in [-1, 1] as an RGB image, `(4, H, W)` as RGBA; what lies outside is clipped."""
    values = (pixels.float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 0)
    return Image.fromarray((values * 255).round().to(torch.uint8).cpu().numpy())
