"""Reading images as people have them: rotated by EXIF, transparent, grey, palette, 16-bit, truncated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from qflux.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"})

_ORIENTATION_TAG = 0x0112
_SIDEWAYS = frozenset({5, 6, 7, 8})
_UNREADABLE = (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError)


def image_size(path: Path) -> tuple[int, int]:
    """Width and height as the image is seen (EXIF orientation applied), from the header alone."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            exif = _png_exif(path) if image.format == "PNG" else image.getexif()
            sideways = exif.get(_ORIENTATION_TAG) in _SIDEWAYS
    except _UNREADABLE as error:
        raise _unreadable(path, error) from None
    return (height, width) if sideways else (width, height)


def load_rgb(path: Path) -> Image.Image:
    """The image upright, in RGB; transparency is composited onto white."""
    return _guarded(path, to_rgb)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL image upright, in 8-bit RGB; transparency is composited onto white."""
    image = _eight_bit(ImageOps.exif_transpose(image))
    return (_over("white", image) if _is_transparent(image) else image).convert("RGB")


def load_mask(path: Path) -> Image.Image:
    """The mask upright, as 8-bit grey; white is the edited region, transparent is not."""
    return _guarded(path, _to_grey)


def to_pixels(image: Image.Image) -> Tensor:
    """An RGB image as `(3, H, W)` float32 in [-1, 1]."""
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255.0 * 2.0 - 1.0


def to_image(pixels: Tensor) -> Image.Image:
    """Pixels `(3, H, W)` in [-1, 1] as an RGB image; what lies outside is clipped."""
    values = (pixels.float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 0)
    return Image.fromarray((values * 255).round().to(torch.uint8).cpu().numpy())


def _guarded(path: Path, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    try:
        with Image.open(path) as image:
            image.load()
            return convert(image)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from None


def _to_grey(image: Image.Image) -> Image.Image:
    image = _eight_bit(ImageOps.exif_transpose(image))
    return (_over("black", image) if _is_transparent(image) else image).convert("L")


def _is_transparent(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


def _over(background: str, image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, background), rgba)


def _png_exif(path: Path) -> Image.Exif:
    """The EXIF chunk of a PNG wherever it stands; Pillow would decode the image to look behind its data."""
    exif = Image.Exif()
    with path.open("rb") as file:
        file.seek(8)
        while len(header := file.read(8)) == 8:
            length, kind = int.from_bytes(header[:4], "big"), header[4:]
            if kind == b"eXIf":
                exif.load(file.read(length))
                break
            file.seek(length + 4, 1)
    return exif


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit grey is scaled, not clipped as PIL's own conversion does."""
    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.float64)
        return Image.fromarray((values / 65535 * 255).round().clip(0, 255).astype(np.uint8), "L")
    if image.mode == "F":
        raise ValueError("floating-point images have no agreed range; convert to 8 or 16 bits")
    return image


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} can't be read as an image: {error}", "replace or remove the file.")
