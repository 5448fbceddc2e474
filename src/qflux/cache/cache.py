"""The embedding cache: everything training needs, addressed by everything it was made from.

    entries/<kind>/<key>.safetensors   one prompt, one image, or one mask; shared by all samples that use it
    samples/<key>.json                 which entries make a sample, and its shapes: written last, so it means complete
    failed/<key>.json                  why a sample could not be encoded
    encoders.json                      what the encoders of a checkpoint are known by, once they have been seen
    index.jsonl                        what is known of source files (see `data.images.index`)
    locks, .unfinished/                processes at work (see `files.locks`)

Keys are in `keys`, what an entry looks like inside in `tensor_file`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qflux.cache import tensor_file
from qflux.cache.keys import Manifest, SampleKeys
from qflux.cache.tensor_file import BrokenEntry
from qflux.data.encoded import COMPLETE, EncodedSample, TextEmbedding, Variant
from qflux.data.images.index import FileIndex
from qflux.errors import CacheError
from qflux.files.atomic import write_bytes, write_json

KINDS = {"text": "tokens", "image": "latents", "mask": "mask"}
"""The kinds of entries, and the tensor that each must hold."""


class EmbeddingCacheManager:
    """Reads and writes the cache at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = FileIndex(root / "index.jsonl")
        self._entries = root / "entries"
        self._seen: set[str] = set()
        """Keys of entries that this process has read before."""

    def entry_path(self, kind: str, key: str) -> Path:
        return self._entries / f"{kind}/{key[:2]}/{key}.safetensors"

    def has(self, kind: str, key: str) -> bool:
        """The entry is there, as long as its header says. (Its contents are checked when they are read.)"""
        return tensor_file.is_whole(self.entry_path(kind, key), f"{kind}/{key}")

    def write(self, kind: str, key: str, tensors: Mapping[str, Tensor], staging: Path | None = None) -> int:
        """Write an entry; its size in bytes."""
        data = tensor_file.dump(tensors, f"{kind}/{key}")
        write_bytes(self.entry_path(kind, key), data, staging)
        return len(data)

    def read(self, kind: str, key: str) -> dict[str, Tensor]:
        """An entry; a `CacheError` that names it if it is missing or not what was written."""
        path = self.entry_path(kind, key)
        try:
            tensors = tensor_file.read(path, f"{kind}/{key}", exactly=key not in self._seen)
            self._seen.add(key)
            if KINDS[kind] not in tensors:
                raise BrokenEntry(f"it has no tensor {KINDS[kind]}")
            return tensors
        except FileNotFoundError:
            raise CacheError(f"{path} is missing", RECACHE) from None
        except (BrokenEntry, OSError) as error:
            raise CacheError(f"{path} is damaged: {error}", REPAIR) from None

    def complete(self, keys: SampleKeys, staging: Path | None = None) -> None:
        """Record that all entries of a sample are there."""
        known = self._manifest(keys.key)
        if known is not None:  # perhaps of a run with dropout, which needs more than this one
            keys = replace(keys, texts=tuple(dict([*known.keys.texts, *keys.texts]).items()))
            keys = replace(keys, texts=tuple((v, key) for v, key in keys.texts if self.has("text", key)))
        texts = {key: text_from(self.read("text", key)) for _, key in keys.texts}
        manifest = Manifest(
            keys,
            lengths=tuple(len(texts[key].tokens) for _, key in keys.texts),
            sizes={key: self.entry_path(kind, key).stat().st_size for kind, key in keys.entries},
            is_cut=any(text.is_cut for text in texts.values()),
        )
        write_json(self.manifest_path(keys.key), manifest.sealed(), staging)
        self._failure(keys).unlink(missing_ok=True)

    def manifest(self, keys: SampleKeys) -> Manifest | None:
        """The manifest of a sample whose entries are all there, at their right sizes."""
        manifest = self._manifest(keys.key)
        if manifest is None:
            return None
        present = all(manifest.sizes.get(key) == self._size(kind, key) for kind, key in keys.entries)
        return manifest if present and set(keys.texts) <= set(manifest.keys.texts) else None

    def missing_entries(self, keys: SampleKeys) -> list[tuple[str, str]]:
        """Entries that are not there, or cut off."""
        return [(kind, key) for kind, key in keys.entries if not self.has(kind, key)]

    def load(self, keys: SampleKeys, variant: Variant = COMPLETE) -> EncodedSample:
        """One sample; an entry that is missing, damaged or of the wrong shape is an error that names it."""
        text = self.read("text", dict(keys.texts)[variant])
        shapes = keys.shapes if variant.controls else keys.shapes.without_controls()
        target, *controls = (
            self._latents(key, rows, columns)
            for key, (_, rows, columns) in zip(keys.images, shapes.images, strict=False)
        )
        mask = self.read("mask", keys.mask)["mask"] if keys.mask else None
        if mask is not None and len(mask) != len(target):
            raise CacheError(f"{self.entry_path('mask', str(keys.mask))} has {len(mask)} values", REPAIR)
        return EncodedSample(keys.id, text_from(text), target, shapes, tuple(controls), mask)

    def _latents(self, key: str, rows: int, columns: int) -> Tensor:
        tokens = self.read("image", key)["latents"]
        if len(tokens) != rows * columns:
            path = self.entry_path("image", key)
            raise CacheError(f"{path} has {len(tokens)} tokens, not {rows}x{columns}", REPAIR)
        return tokens

    def fail(self, keys: SampleKeys, reason: str, circumstances: str, staging: Path | None = None) -> None:
        """Record that a sample can't be encoded under certain circumstances."""
        write_json(self._failure(keys), {"reason": reason, "circumstances": circumstances}, staging)

    def failure(self, keys: SampleKeys, circumstances: str) -> str | None:
        """Why a sample could not be encoded, if that was tried under the same circumstances."""
        try:
            record = json.loads(self._failure(keys).read_text())
            return str(record["reason"]) if record["circumstances"] == circumstances else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember_encoders(self, checkpoint: str, identities: Sequence[str], staging: Path | None = None) -> None:
        """Note what the encoders of a checkpoint are known by."""
        known = self._encoders()
        if known.get(checkpoint) != list(identities):
            write_json(self.root / "encoders.json", known | {checkpoint: list(identities)}, staging)

    def encoders(self, checkpoint: str) -> list[str] | None:
        """What the encoders of a checkpoint were known by when they were last seen."""
        return self._encoders().get(checkpoint)

    def manifest_path(self, key: str) -> Path:
        return self.root / "samples" / key[:2] / f"{key}.json"

    def manifests(self) -> Iterator[Path]:
        """The manifest of every sample in the cache, wanted or not."""
        yield from sorted((self.root / "samples").glob("*/*.json"))

    def entry_files(self) -> Iterator[tuple[str, Path]]:
        """Kind and file of every entry in the cache, wanted or not."""
        for kind in KINDS:
            yield from ((kind, path) for path in sorted((self.root / "entries" / kind).glob("*/*.safetensors")))

    def _manifest(self, key: str) -> Manifest | None:
        try:
            return Manifest.parse(key, self.manifest_path(key).read_text())
        except (OSError, ValueError):
            return None

    def _size(self, kind: str, key: str) -> int | None:
        try:
            return self.entry_path(kind, key).stat().st_size
        except OSError:
            return None

    def _failure(self, keys: SampleKeys) -> Path:
        return self.root / "failed" / f"{keys.key}.json"

    def _encoders(self) -> dict[str, list[str]]:
        try:
            known = json.loads((self.root / "encoders.json").read_text())
        except (OSError, ValueError):
            return {}
        items = known.items() if isinstance(known, dict) else ()
        return {name: values for name, values in items if isinstance(values, list) and all(map(_is_key, values))}


def _is_key(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


RECACHE = "run `qflux cache` with the same config."
REPAIR = "run `qflux cache verify --repair`, then `qflux cache`, with the same config."


def text_tensors(text: TextEmbedding) -> dict[str, Tensor]:
    """A prompt as its entry holds it."""
    pooled = {} if text.pooled is None else {"pooled": text.pooled}
    places = {"places": torch.tensor(text.places)} if text.places else {}
    return {"tokens": text.tokens} | pooled | places | ({"cut": torch.ones(1)} if text.is_cut else {})


def text_from(tensors: Mapping[str, Tensor]) -> TextEmbedding:
    """The inverse of `text_tensors`."""
    places = tensors["places"].tolist() if "places" in tensors else ()
    return TextEmbedding(tensors["tokens"], tensors.get("pooled"), "cut" in tensors, tuple(places))


@dataclass(frozen=True)
class CachedEmbeddings:
    """The embeddings of one sample in a cache: what `Sample.embeddings` is for samples made from images."""

    store: EmbeddingCacheManager
    keys: SampleKeys

    @property
    def key(self) -> str:
        return self.keys.key

    @property
    def identity(self) -> str:
        return self.keys.identity

    def load(self, variant: Variant) -> EncodedSample:
        return self.store.load(self.keys, variant)
