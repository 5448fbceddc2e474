"""Samples that exist only as embeddings: another cache folder, torch files (`torch_files`), a cache of the original."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.keys import Manifest, Projected
from qflux.cache.torch_files import REMEDY, TorchSample, content_of, read_torch, torch_files
from qflux.config import CacheSource
from qflux.data.encoded import COMPLETE, NO_CAPTION, EncodedSample, Variant
from qflux.data.images.decode import shown
from qflux.data.sample import Sample
from qflux.data.sources.listing import Listing
from qflux.errors import CacheError, DataError
from qflux.files.hashing import key_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredEmbeddings:
    """The embeddings of a sample that has no images: what `Sample.embeddings` is for it."""

    key: str
    variants: tuple[Variant, ...]
    """What of the sample is stored; a config may ask for more."""
    read: Callable[[Variant], EncodedSample] = field(compare=False, repr=False)
    projected: Projected | None = None

    @property
    def identity(self) -> str:
        return self.projected.sample if self.projected else self.key

    def load(self, variant: Variant) -> EncodedSample:
        return self.read(variant)


def read_stored(source: CacheSource, is_prior: bool = False) -> tuple[list[Sample], Listing]:
    """All samples of a folder, and what is wrong with the others."""
    listing = Listing(shown(source.path))
    if not source.path.is_dir():
        raise DataError(f"no folder {source.path}", "check the path of the source.")
    samples: list[Sample] = []
    rebuilt: Counter[str] = Counter()
    store = EmbeddingCacheManager(source.path)
    for file in store.manifests():
        try:
            samples.append(_from_manifest(store, file))
        except CacheError as error:
            listing.fault(shown(file), error.problem, error.remedy)
    for file in torch_files(source.path):
        try:
            found = read_torch(file, source.default_size)
            samples += _from_torch(file, found, source.default_size)
            rebuilt.update(sample.rebuilt for sample in found if sample.rebuilt)
        except CacheError as error:
            listing.fault(shown(file), error.problem, error.remedy)
    for how, count in rebuilt.items():
        logger.warning("%s: the shapes of %d samples are rebuilt from %s", listing.source, count, how)
    samples = [replace(sample, source=listing.source, rate=source.rate, is_prior=is_prior) for sample in samples]
    return samples, listing


def _from_manifest(store: EmbeddingCacheManager, file: Path) -> Sample:
    try:
        manifest = Manifest.parse(file.stem, file.read_text())
    except (OSError, ValueError) as error:
        raise CacheError(f"not the manifest of a sample: {error}", REMEDY) from None
    keys = manifest.keys
    if store.manifest(keys) is None:
        raise CacheError("not all its entries are there", REMEDY)
    return Sample(
        id=keys.id,
        name=shown(file.stem),
        prompt="",
        shapes=keys.shapes,
        place=shown(file),
        has_mask=keys.mask is not None,
        embeddings=StoredEmbeddings(keys.key, keys.variants, partial(store.load, keys), keys.projected),
        text_tokens=manifest.text_tokens,
        further_captions=("",) * (sum(variant.is_complete for variant in keys.variants) - 1),
    )


def _from_torch(file: Path, found: list[TorchSample], default: tuple[int, int] | None) -> Iterator[Sample]:
    content = key_of("torch file", content_of(file), default)
    for number, sample in enumerate(found):
        key = content if len(found) == 1 else key_of(content, number)
        variants = (COMPLETE, *([NO_CAPTION] if sample.empty else []))
        yield Sample(
            id=key,
            name=shown(file.stem) if len(found) == 1 else f"{shown(file.stem)} ({number + 1} of {len(found)})",
            prompt="",
            shapes=sample.encoded.shapes,
            place=shown(file),
            has_mask=sample.encoded.mask is not None,
            embeddings=StoredEmbeddings(key, variants, partial(_load_torch, file, default, number)),
            text_tokens=len(sample.encoded.text.tokens),
        )


def _load_torch(file: Path, default: tuple[int, int] | None, number: int, variant: Variant) -> EncodedSample:
    sample = read_torch(file, default)[number]
    if variant == COMPLETE:
        return sample.encoded
    if variant == NO_CAPTION and sample.empty is not None:
        return replace(sample.encoded, text=sample.empty)
    raise CacheError(f"{file} has no embedding {variant.name}", "set the dropout of captions and controls to 0.")
