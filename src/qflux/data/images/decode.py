"""Reading images as people have them: rotated by EXIF, transparent, grey, palette, CMYK, 16-bit, truncated.

An image is an `ImageRef`: something with bytes. Most are files; a data set may hold them in a table.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from qflux.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"})

_ORIENTATION_TAG = 0x0112
_SIDEWAYS = frozenset({5, 6, 7, 8})
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_DEEP = ("I;16", "I;16B", "I;16L", "I")


class _Local(threading.local):
    """A buffer per thread, kept: fresh memory for every file would cost as much as hashing it."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(1 << 20))


_local = _Local()


ByteStream = io.BufferedReader | io.BytesIO


class ImageRef(Protocol):
    """Where an image is. `str` names it in messages."""

    def open(self) -> ByteStream: ...

    def stamp(self) -> list[Any] | None:
        """Its place first, then what changes whenever its bytes do; none if that can't be told without reading."""


@dataclass(frozen=True)
class ImageFile:
    """An image in a file."""

    path: Path

    def open(self) -> ByteStream:
        self._regular()
        return self.path.open("rb")

    def _regular(self) -> os.stat_result:
        """An error for a pipe or a device, which would be waited for without end."""
        status = self.path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status

    def stamp(self) -> list[Any]:
        status = self._regular()
        # The change time moves even when a tool restores the modification time of a replaced file.
        signs = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        return [str(self.path.absolute()), *signs]

    def __str__(self) -> str:
        return shown(self.path)


@dataclass(frozen=True)
class ImageFacts:
    """What the header of an image says, and the hash of its bytes."""

    width: int
    height: int
    """As the image is seen: EXIF orientation applied."""
    format: str
    mode: str
    """Pillow's name of the pixel format."""
    deep: bool
    """More than 8 bits a channel."""
    orientation: int
    """EXIF's: 1 is upright, 3 upside down."""
    hash: str

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    def dump(self) -> dict[str, Any]:
        return dict(vars(self))


def shown(path: Path | str) -> str:
    """A path for messages and tables: a file name may hold a newline, and must not look like two."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(path))


def read_facts(image: ImageRef) -> ImageFacts:
    """Facts from one pass over the bytes; no pixel is decoded."""
    try:
        with image.open() as file:
            header = _header(file)
            file.seek(0)
            digest = hashlib.sha256()
            while length := file.readinto(_local.block):
                digest.update(_local.block[:length])
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever the bytes make them raise
        raise _unreadable(image, error) from None
    return ImageFacts(**header, hash=digest.hexdigest())


def _header(file: ByteStream) -> dict[str, Any]:
    with Image.open(file) as image:
        exif = _png_exif(file, image) if image.format == "PNG" else image.getexif()
        orientation = exif.get(_ORIENTATION_TAG, 1)
        # Pillow turns a TIFF while it reads it, and says so in its size.
        turns = orientation in _SIDEWAYS and image.format != "TIFF"
        width, height = image.size[::-1] if turns else image.size
        return {
            "width": width,
            "height": height,
            "format": image.format or "",
            "mode": image.mode,
            # Pillow reads a 16-bit colour PNG as 8-bit RGB; only its decoder's arguments tell.
            "deep": image.mode in _DEEP or any("16" in str(tile.args) for tile in image.tile if tile[0] == "zip"),
            "orientation": orientation if orientation in range(1, 9) else 1,
        }


def load_rgb(image: ImageRef, expected: str | None = None) -> Image.Image:
    """The image upright, in RGB; transparency is composited onto white.

    With the hash of its bytes, an image that has changed since that was taken is an error.
    """
    return _guarded(image, to_rgb, expected)


def load_rgba(image: ImageRef, expected: str | None = None) -> Image.Image:
    """The same with its opacity."""
    return _guarded(image, to_rgba, expected)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL image upright, in 8-bit RGB; transparency is composited onto white."""
    image = _eight_bit(_upright(image))
    rgb = (_over("white", image) if _is_transparent(image) else image).convert("RGB")
    rgb.info = {}  # it has been turned: an orientation left behind would turn it again
    return rgb


def to_rgba(image: Image.Image) -> Image.Image:
    """Any PIL image upright, in 8-bit RGBA; what has no transparency is opaque."""
    rgba = _eight_bit(_upright(image)).convert("RGBA")
    rgba.info = {}
    return rgba


def load_mask(image: ImageRef, expected: str | None = None) -> Image.Image:
    """The mask upright, as 8-bit grey; white is the edited region, transparent is not."""
    return _guarded(image, _to_grey, expected)


def load_small(image: ImageRef, side: int) -> Image.Image:
    """The image in RGB at `side` x `side`, stretched. JPEGs are decoded at a fraction of their size: fast."""

    def shrink(opened: Image.Image) -> Image.Image:
        return to_rgb(opened).resize((side, side), Image.Resampling.BOX)

    return _guarded(image, shrink, draft=(4 * side, 4 * side))


def _guarded(
    image: ImageRef,
    convert: Callable[[Image.Image], Image.Image],
    expected: str | None = None,
    draft: tuple[int, int] | None = None,
) -> Image.Image:
    try:
        with _content(image, expected) as file, Image.open(file) as opened:
            if draft and opened.format == "JPEG" and opened.mode in ("RGB", "L"):
                opened.draft(opened.mode, draft)
            opened.load()
            return convert(opened)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise whatever the bytes make them raise
        raise _unreadable(image, error) from None


def _content(image: ImageRef, expected: str | None) -> ByteStream:
    """The bytes of an image; those that are hashed are those that are decoded."""
    if expected is None:
        return image.open()
    with image.open() as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != expected:
        raise ValueError("it has changed since its header was read; run the command again")
    return io.BytesIO(data)


def _upright(image: Image.Image) -> Image.Image:
    """Turned as EXIF says. Pillow's own function also writes the metadata anew, and fails if they are odd."""
    method = _TRANSPOSE.get(image.getexif().get(_ORIENTATION_TAG, 1))
    return image if method is None else image.transpose(method)


def _to_grey(image: Image.Image) -> Image.Image:
    image = _eight_bit(_upright(image))
    return (_over("black", image) if _is_transparent(image) else image).convert("L")


def _is_transparent(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


def _over(background: str, image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, background), rgba)


def _png_exif(file: ByteStream, image: Image.Image) -> Image.Exif:
    """The EXIF data of a PNG, wherever they stand; Pillow would decode the image to look behind its pixels.

    A few programs hide them in text. Then Pillow has to look.
    """
    exif = Image.Exif()
    file.seek(8)
    while len(header := file.read(8)) == 8:
        length, kind = int.from_bytes(header[:4], "big"), header[4:]
        if kind == b"eXIf":
            exif.load(file.read(length))
            break
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            start = file.tell()
            if file.read(min(length, 24)).startswith((b"Raw profile type", b"XML:com.adobe.xmp")):
                file.seek(0)
                return image.getexif()
            file.seek(start)
        file.seek(length + 4, io.SEEK_CUR)
    return exif


def _eight_bit(image: Image.Image) -> Image.Image:
    """16-bit grey is scaled, not clipped as PIL's own conversion does."""
    if image.mode in _DEEP:
        values = np.asarray(image).astype(np.float64)
        if values.max() > 65535:
            raise ValueError("integers beyond 16 bits have no agreed range; convert to 8 or 16 bits")
        return Image.fromarray((values / 65535 * 255).round().clip(0, 255).astype(np.uint8), "L")
    if image.mode == "F":
        raise ValueError("floating-point images have no agreed range; convert to 8 or 16 bits")
    return image


def _unreadable(image: ImageRef, error: Exception) -> DataError:
    remedy = "check the path." if isinstance(error, FileNotFoundError) else "replace or remove the file."
    return DataError(f"{image} can't be read as an image: {_reason(error)}", remedy)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "its format is not known"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
