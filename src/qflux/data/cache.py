"""The embedding cache: everything training needs, addressed by everything it was made from.

    entries/<kind>/<key>.safetensors   one prompt, one image, or one mask; shared by all samples that use it
    samples/<key>.json                 which entries make a sample, and its shapes: written last, so it means complete
    failed/<key>.json                  why a sample could not be encoded
    index.jsonl                        what is known of source files (see `index`)

An entry's key is a hash of the source's bytes, the transform, the encoder and the dtype. Changing one of them is a
miss; there is no such thing as a stale entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from qflux.data.encoded import EncodedExample, TextEmbedding
from qflux.data.index import FileIndex
from qflux.data.store import key_of, write_json, write_tensors
from qflux.errors import CacheError
from qflux.ragged.layout import ImageShape

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
        self.index = FileIndex(root / "index.jsonl")

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
        self._failure(keys).unlink(missing_ok=True)

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

    def text_tokens(self, keys: SampleKeys) -> int:
        """The length of a sample's prompt, from the header of its entry."""
        with safe_open(self.entry_path("text", keys.text), framework="pt") as file:
            return int(file.get_slice("tokens").get_shape()[0])

    def fail(self, keys: SampleKeys, reason: str) -> None:
        """Record that a sample can't be encoded."""
        write_json(self._failure(keys), {"reason": reason})

    def failure(self, keys: SampleKeys) -> str | None:
        """Why a sample could not be encoded, if that was tried."""
        try:
            return str(json.loads(self._failure(keys).read_text())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _failure(self, keys: SampleKeys) -> Path:
        return self.root / "failed" / f"{keys.key}.json"

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


_RECACHE = "run `qflux cache` with the same config."
