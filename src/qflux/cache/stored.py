"""Samples that exist only as embeddings: another cache folder, torch files (`torch_files`), a cache of the original."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from qflux.cache.cache import EmbeddingCacheManager, Manifest
from qflux.cache.torch_files import REMEDY, TorchSample, content_of, read_torch, torch_files
from qflux.config import CacheSource
from qflux.data.encoded import WHOLE, EncodedExample, Variant
from qflux.data.images.decode import ImageFile, shown
from qflux.data.sources.listing import EditExample, Listing
from qflux.errors import CacheError, DataError
from qflux.files.hashing import key_of
from qflux.ragged.shapes import ImageShape, image_tokens

logger = logging.getLogger(__name__)

_NO_CAPTION = Variant(caption=False)


@dataclass(frozen=True)
class StoredSample:
    """A sample as embeddings on disk."""

    id: str
    example: EditExample
    img_shapes: tuple[ImageShape, ...]
    text_tokens: int
    has_mask: bool
    address: str
    """Changes with the embeddings."""
    variants: tuple[Variant, ...]
    load: Callable[[Variant], EncodedExample] = field(compare=False, repr=False)

    @property
    def image_tokens(self) -> int:
        return image_tokens(self.img_shapes)

    @property
    def target_tokens(self) -> int:
        return image_tokens(self.img_shapes[:1])


def read_stored(source: CacheSource, is_prior: bool = False) -> tuple[list[StoredSample], Listing]:
    """All samples of a folder, and what is wrong with the others."""
    listing = Listing(shown(source.path), is_stored=True)
    if not source.path.is_dir():
        raise DataError(f"no folder {source.path}", "check the path of the source.")
    samples: list[StoredSample] = []
    rebuilt: Counter[str] = Counter()

    def described(file: Path, number: int = 0, count: int = 1) -> EditExample:
        name = shown(file.stem) if count == 1 else f"{shown(file.stem)} ({number + 1} of {count})"
        return EditExample(name, ImageFile(file), "", (), None, listing.source, source.rate, is_prior)

    for file in EmbeddingCacheManager(source.path).manifests():
        try:
            samples.append(_from_manifest(source.path, file, described(file)))
        except CacheError as error:
            listing.fault(shown(file), error.problem, error.remedy)
    for file in torch_files(source.path):
        try:
            found = read_torch(file, source.default_size)
            examples = [described(file, number, len(found)) for number in range(len(found))]
            samples += _from_torch(file, found, examples, source.default_size)
            rebuilt.update(sample.rebuilt for sample in found if sample.rebuilt)
        except CacheError as error:
            listing.fault(shown(file), error.problem, error.remedy)
    for how, count in rebuilt.items():
        logger.warning("%s: the shapes of %d samples are rebuilt from %s", listing.source, count, how)
    listing.examples = [sample.example for sample in samples]
    return samples, listing


def _from_manifest(root: Path, file: Path, example: EditExample) -> StoredSample:
    store = EmbeddingCacheManager(root)
    try:
        manifest = Manifest.parse(file.stem, file.read_text())
    except (OSError, ValueError) as error:
        raise CacheError(f"not the manifest of a sample: {error}", REMEDY) from None
    if store.manifest(manifest.keys) is None:
        raise CacheError("not all its entries are there", REMEDY)
    variants = tuple(variant for variant, _, _ in manifest.texts)
    return StoredSample(
        id=manifest.id,
        example=example,
        img_shapes=manifest.img_shapes,
        text_tokens=manifest.text_tokens,
        has_mask=manifest.mask is not None,
        address=manifest.key,
        variants=variants,
        load=partial(store.load, manifest.keys),
    )


def _from_torch(
    file: Path, found: list[TorchSample], examples: list[EditExample], default: tuple[int, int] | None
) -> Iterator[StoredSample]:
    content = key_of("torch file", content_of(file), default)
    for number, (sample, example) in enumerate(zip(found, examples, strict=True)):
        address = content if len(found) == 1 else key_of(content, number)
        yield StoredSample(
            id=address,
            example=example,
            img_shapes=sample.encoded.img_shapes,
            text_tokens=len(sample.encoded.text.tokens),
            has_mask=sample.encoded.mask is not None,
            address=address,
            variants=(WHOLE, *([_NO_CAPTION] if sample.empty else [])),
            load=partial(_load_torch, file, default, number),
        )


def _load_torch(file: Path, default: tuple[int, int] | None, number: int, variant: Variant) -> EncodedExample:
    sample = read_torch(file, default)[number]
    if variant == WHOLE:
        return sample.encoded
    if variant == _NO_CAPTION and sample.empty is not None:
        return replace(sample.encoded, text=sample.empty)
    raise CacheError(f"{file} has no embedding {variant.name}", "set the dropout of captions and controls to 0.")
