"""Where finished edits go: a folder that survives interruption.

The images of a batch are first written together into `.unfinished/<batch>/`, which gets its name when all are there,
and are then moved to their places. Killed before that, the batch is made again; killed after, it is only moved. So
every image that appears was made once, in the batch it belongs to.

Each image carries what it was made from: prompt, seed, settings, and a key of all of it.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from qflux.data.images.decode import to_rgb
from qflux.errors import DataError
from qflux.files.atomic import sweep, sync_folder, write_bytes

UNFINISHED = ".unfinished"
MOST_EXIF = 60_000
"""Bytes of notes that fit into the EXIF block of a JPEG."""


SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def image_file(output: Path, images: Sequence[Path]) -> Path:
    """The name of an image to write; an error if it is none, or somebody's own, or one of the `images` to edit."""
    if output.suffix.lower() not in SUFFIXES:
        raise DataError(f"--output {output} is no image file name", "use .png, .jpg or .webp.")
    if output.is_dir():
        raise DataError(f"--output {output} is a folder", "give a file name.")
    if any(output.resolve() == image.resolve() for image in images):
        raise DataError(f"--output {output} is the image to edit", "give another name.")
    if output.exists() and not read_notes(output):
        raise DataError(f"--output {output} is there already, and was not made by qflux", "give another name.")
    return output


class Gallery:
    """The images of one list of jobs, as PNG files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._recover()

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.png"

    def has(self, name: str, key: str) -> bool:
        """Whether an image is there and was made from just this; one made from something else is an error."""
        path = self.path(name)
        if not path.exists():
            return False
        made = read_notes(path).get("key")
        if made != key:
            raise DataError(
                f"{path} is there already, and was made from something else",
                "choose another --output, or remove it.",
            )
        return True

    def add(self, batch: str, images: Mapping[str, tuple[Image.Image, Mapping[str, Any]]]) -> None:
        """All images of a batch, by name, each with its notes."""
        staging = self.folder / UNFINISHED / f"{batch}.tmp"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for name, (image, notes) in images.items():
            write_bytes(staging / f"{name}.png", encoded(image, ".png", notes))
        complete = staging.with_suffix("")
        staging.rename(complete)
        sync_folder(complete.parent)
        self._move(complete)

    def _recover(self) -> None:
        """What a killed run has left: batches that were complete are put in place, the rest is removed."""
        sweep(self.folder)
        unfinished = self.folder / UNFINISHED
        for batch in sorted(unfinished.iterdir()) if unfinished.is_dir() else []:
            if batch.suffix == ".tmp":
                shutil.rmtree(batch)
            else:
                self._move(batch)
        self._tidy()

    def _move(self, batch: Path) -> None:
        for file in sorted(batch.iterdir()):
            file.replace(self.folder / file.name)
        sync_folder(self.folder)
        batch.rmdir()
        self._tidy()

    def _tidy(self) -> None:
        unfinished = self.folder / UNFINISHED
        if unfinished.is_dir() and not any(unfinished.iterdir()):
            unfinished.rmdir()


def encoded(image: Image.Image, suffix: str, notes: Mapping[str, Any]) -> bytes:
    """An image file with its notes: as PNG text, or in the EXIF description of other formats."""
    buffer = io.BytesIO()
    text = json.dumps(dict(notes), sort_keys=True)
    if suffix == ".png":
        info = PngInfo()
        info.add_itxt("prompt", str(notes.get("prompt", "")))
        info.add_itxt("qflux", text)
        image.save(buffer, "PNG", pnginfo=info)
    else:
        exif = Image.Exif()
        if len(text.encode()) > MOST_EXIF:
            text = json.dumps({"prompt": str(notes.get("prompt", ""))[:1000], "cut": True})
        exif[0x010E] = text  # ImageDescription
        kind = Image.registered_extensions()[suffix]
        shown = to_rgb(image) if kind in ("JPEG", "BMP") else image  # these know no transparency
        shown.save(buffer, kind, exif=exif, quality=95)
    return buffer.getvalue()


def read_notes(path: Path) -> dict[str, Any]:
    """What an image says about how it was made; nothing if it does not."""
    try:
        with Image.open(path) as image:
            image.load()
            text = image.info.get("qflux") or image.getexif().get(0x010E) or "{}"
        notes = json.loads(text)
    except (OSError, ValueError, TypeError):
        return {}
    return notes if isinstance(notes, dict) else {}
