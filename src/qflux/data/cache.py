"""The embedding cache: everything training needs, addressed by everything it was made from.

    entries/<kind>/<key>.safetensors   one prompt, one image, or one mask; shared by all samples that use it
    samples/<key>.json                 which entries make a sample, and its shapes: written last, so it means complete
    files.json                         hashes of source files, remembered while size, times and inode stay

An entry's key is a hash of the source's bytes, the transform, the encoder and the dtype. Changing one of them is a
miss; there is no such thing as a stale entry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from qflux.data.encoded import EncodedExample, TextEmbedding
from qflux.data.store import file_hash, key_of, write_json, write_tensors
from qflux.errors import CacheError
from qflux.ragged.layout import ImageShape

logger = logging.getLogger(__name__)

VERSION = "2.0"


@dataclass(frozen=True)
class SampleKeys:
    """Where the parts of one sample lie in the cache."""

    id: str
    """Of the sample itself, from its content: independent of paths, transforms and encoders."""
    text: str
    images: tuple[str, ...]
    img_shapes: tuple[ImageShape, ...]
    mask: str | None

    @property
    def key(self) -> str:
        return key_of("sample", VERSION, self.text, self.images, self.mask)

    @property
    def entries(self) -> list[tuple[str, str]]:
        mask = [("mask", self.mask)] if self.mask else []
        return [("text", self.text), *(("image", key) for key in self.images), *mask]


class EmbeddingCacheManager:
    """Reads and writes the cache at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._hashes: dict[str, list[Any]] | None = None

    def entry_path(self, kind: str, key: str) -> Path:
        return self.root / "entries" / kind / key[:2] / f"{key}.safetensors"

    def has(self, kind: str, key: str) -> bool:
        """The entry exists, and its header fits its length: a truncated file counts as missing."""
        try:
            with safe_open(self.entry_path(kind, key), framework="pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def ensure(self, kind: str, key: str, make: Callable[[], Mapping[str, Tensor]]) -> bool:
        """Write the entry unless it exists; true if it had to be made."""
        if self.has(kind, key):
            return False
        write_tensors(self.entry_path(kind, key), make(), {"version": VERSION})
        return True

    def complete(self, keys: SampleKeys) -> None:
        """Record that all entries of a sample are there."""
        manifest = {
            "version": VERSION,
            "id": keys.id,
            "entries": keys.entries,
            "img_shapes": keys.img_shapes,
            "n_controls": len(keys.images) - 1,
        }
        write_json(self._manifest(keys), manifest)

    def is_complete(self, keys: SampleKeys) -> bool:
        return self._manifest(keys).is_file() and all(self.has(kind, key) for kind, key in keys.entries)

    def load(self, keys: SampleKeys) -> EncodedExample:
        """One sample; an entry that is missing, damaged or of the wrong shape is an error that names it."""
        text = self._read("text", keys.text)
        latents = tuple(self._read("image", key)["latents"] for key in keys.images)
        for key, tokens, (_, rows, columns) in zip(keys.images, latents, keys.img_shapes, strict=True):
            if len(tokens) != rows * columns:
                raise CacheError(
                    f"{self.entry_path('image', key)} has {len(tokens)} tokens, not {rows}x{columns}", _RECACHE
                )
        mask = self._read("mask", keys.mask)["mask"] if keys.mask else None
        if mask is not None and len(mask) != len(latents[0]):
            raise CacheError(f"{self.entry_path('mask', str(keys.mask))} has {len(mask)} values", _RECACHE)
        return EncodedExample(
            id=keys.id,
            text=TextEmbedding(text["tokens"], text.get("pooled")),
            latents=latents,
            img_shapes=keys.img_shapes,
            mask=mask,
        )

    def hash_of(self, path: Path) -> str:
        """The hash of a source file, remembered while nothing about it changes."""
        if self._hashes is None:
            self._hashes = self._read_hashes()
        status = path.stat()
        known = self._hashes.get(str(path.resolve()))
        # The change time moves even when a tool restores the modification time of a replaced file.
        signs = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if known and known[:-1] == signs:
            return str(known[-1])
        digest = file_hash(path)
        self._hashes[str(path.resolve())] = [*signs, digest]
        return digest

    def remember_hashes(self) -> None:
        if self._hashes:
            write_json(self.root / "files.json", self._hashes)

    def _manifest(self, keys: SampleKeys) -> Path:
        return self.root / "samples" / keys.key[:2] / f"{keys.key}.json"

    def _read(self, kind: str, key: str) -> dict[str, Tensor]:
        path = self.entry_path(kind, key)
        needed = {"text": "tokens", "image": "latents", "mask": "mask"}[kind]
        try:
            tensors = load_file(path)
            if needed not in tensors:
                raise OSError(f"it has no tensor {needed}")
            return tensors
        except FileNotFoundError:
            raise CacheError(f"{path} is missing", _RECACHE) from None
        except (SafetensorError, OSError) as error:
            raise CacheError(f"{path} is damaged: {error}", f"delete it, then {_RECACHE}") from None

    def _read_hashes(self) -> dict[str, list[Any]]:
        path = self.root / "files.json"
        try:
            known = json.loads(path.read_text())
            if not isinstance(known, dict) or not all(isinstance(value, list) for value in known.values()):
                raise ValueError("it is no table of hashes")
            return known
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("%s can't be read (%s): source files are hashed again.", path, error)
            return {}


_RECACHE = "run `qflux cache` with the same config."
