"""Samples and their embeddings: where they belong in the cache, how they are made, what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qflux.config import Config
from qflux.data.cache import VERSION, EmbeddingCacheManager, SampleKeys
from qflux.data.encoded import EncodedExample, Prompt, TextEmbedding
from qflux.data.examples import Fault
from qflux.data.geometry import Transform
from qflux.data.images import ImageRef, load_mask, load_rgb, to_pixels
from qflux.data.samples import Progress, SizedExample, gather, require_usable
from qflux.data.store import key_of
from qflux.errors import CacheError, DataError, collected
from qflux.models.family import Encoder, Family, text_limit
from qflux.models.loading import checkpoint_folder, identity
from qflux.ragged.patches import mask_to_tokens


@dataclass(frozen=True)
class PlannedSample(SizedExample):
    """A sample that also knows where its embeddings belong."""

    keys: SampleKeys


@dataclass
class PlannedSet:
    """The samples of a config."""

    training: list[PlannedSample]
    """In the order of their ids."""
    held_out: list[PlannedSample]
    faults: list[Fault]
    """What is left out, and why."""

    @property
    def all(self) -> list[PlannedSample]:
        return [*self.training, *self.held_out]

    def drop(self, sample: PlannedSample, reason: str) -> None:
        """Leave a sample out."""
        self.training = [other for other in self.training if other is not sample]
        self.held_out = [other for other in self.held_out if other is not sample]
        self.faults.append(Fault(sample.example.name, reason, source=sample.example.source))


@dataclass
class CacheReport:
    """What `qflux cache` did."""

    samples: int = 0
    new_entries: int = 0
    reused_entries: int = 0
    skipped: list[str] = field(default_factory=list)
    cut: int = 0
    """Prompts that were longer than allowed, and were cut."""


def plan_samples(
    config: Config, family: Family, cache: EmbeddingCacheManager, progress: Progress | None = None
) -> PlannedSet:
    """The samples of a config with their places in the cache; no image is decoded."""
    gathered = gather(config.data, family, cache.index, progress)
    require_usable(gathered, config.data)
    keys = _KeyMaker(config, family, cache)
    training, held_out = (
        [PlannedSample(**vars(sample), keys=keys(sample)) for sample in part]
        for part in (gathered.training, gathered.held_out)
    )
    cache.index.save()
    return PlannedSet(training, held_out, gathered.faults)


class _KeyMaker:
    """The cache keys of a sample: everything its entries are made from, and nothing else."""

    def __init__(self, config: Config, family: Family, cache: EmbeddingCacheManager) -> None:
        folder = checkpoint_folder(config.model.pretrained, (*family.text_parts, *family.image_parts))
        self._family = family.name
        self._dtype = config.model.dtype
        self._length = text_limit(config, family).tokens
        self._text_identity = identity(folder, family.text_parts, cache.index.hash_of)
        self._image_identity = identity(folder, family.image_parts, cache.index.hash_of)

    def __call__(self, sample: SizedExample) -> SampleKeys:
        controls = zip(sample.facts[1:], sample.views, strict=True)
        seen = [(fact.hash, view.key) for fact, view in controls if view]
        prompt = (self._family, sample.example.prompt, seen, self._length)
        target = sample.transforms[0].key
        return SampleKeys(
            id=sample.id,
            text=key_of("text", VERSION, prompt, self._text_identity, self._dtype),
            images=tuple(
                key_of("image", VERSION, fact.hash, transform.key, self._image_identity, self._dtype)
                for fact, transform in zip(sample.facts, sample.transforms, strict=True)
            ),
            img_shapes=sample.img_shapes,
            mask=key_of("mask", VERSION, sample.mask_hash, target) if sample.mask_hash else None,
        )


def fill_cache(
    planned: Sequence[PlannedSample], encoder: Encoder, cache: EmbeddingCacheManager, progress: Progress | None = None
) -> tuple[CacheReport, dict[str, str]]:
    """Encode what is missing. Interrupted at any point, a second run goes on where this one was.

    A sample that can't be encoded does not stop the others. Returns an account, and why which sample failed.
    """
    report, failed = CacheReport(samples=len(planned)), {}
    for index, sample in enumerate(planned):
        try:
            for kind, key, make in _entries(sample, encoder):
                if cache.ensure(kind, key, make):
                    report.new_entries += 1
                else:
                    report.reused_entries += 1
            if not cache.is_complete(sample.keys):
                cache.complete(sample.keys)
        except DataError as error:
            cache.fail(sample.keys, error.problem)
            failed[sample.example.name] = str(error)
        if progress:
            progress(index + 1, len(planned))
    return report, failed


def require_complete(planned: PlannedSet, cache: EmbeddingCacheManager, skip_failed: bool) -> None:
    """An error that names the samples whose embeddings are missing; those known to be unusable may be left out."""
    incomplete = [sample for sample in planned.all if not cache.is_complete(sample.keys)]
    missing = []
    for sample in incomplete:
        reason = cache.failure(sample.keys)
        if reason and skip_failed:
            planned.drop(sample, reason)
        else:
            missing.append(sample.example.name + (f": {reason}" if reason else ""))
    if missing:
        raise collected(
            CacheError,
            f"{len(missing)} of {len(planned.all)} samples are not in the cache {cache.root}",
            missing,
            "run `qflux cache` with the same config first.",
        )


@dataclass(frozen=True)
class OpenedExample:
    """A sample as its encoders need it: decoded, at its sizes, not encoded yet."""

    sample: PlannedSample
    images: tuple[Tensor, ...]
    """Pixels `(3, H, W)` in [-1, 1], target first."""
    prompt: Prompt
    mask: Tensor | None


def open_example(sample: PlannedSample) -> OpenedExample:
    """Read and transform the images of a sample."""
    example = sample.example
    images = tuple(
        to_pixels(transform(load_rgb(ref))) for ref, transform in zip(example.images, sample.transforms, strict=True)
    )
    mask = _token_mask(example.mask, sample.transforms[0]) if example.mask else None
    return OpenedExample(sample, images, _prompt(sample), mask)


def encode_example(opened: OpenedExample, encoder: Encoder) -> EncodedExample:
    """The same as the cache holds, made now."""
    return EncodedExample(
        id=opened.sample.id,
        text=_encoded_text(opened.sample, opened.prompt, encoder),
        latents=tuple(encoder.encode_image(pixels).cpu() for pixels in opened.images),
        img_shapes=opened.sample.img_shapes,
        mask=opened.mask,
    )


def _entries(sample: PlannedSample, encoder: Encoder) -> list[tuple[str, str, Callable[[], Mapping[str, Tensor]]]]:
    """Kind, key and recipe of every entry of a sample; a recipe runs only if the entry is missing."""
    example, keys = sample.example, sample.keys

    def text() -> Mapping[str, Tensor]:
        embedding = _encoded_text(sample, _prompt(sample), encoder)
        return {"tokens": embedding.tokens} | ({} if embedding.pooled is None else {"pooled": embedding.pooled})

    def image(ref: ImageRef, transform: Transform) -> Mapping[str, Tensor]:
        return {"latents": encoder.encode_image(to_pixels(transform(load_rgb(ref))))}

    entries: list[tuple[str, str, Callable[[], Mapping[str, Tensor]]]] = [("text", keys.text, text)]
    for ref, transform, key in zip(example.images, sample.transforms, keys.images, strict=True):
        entries.append(("image", key, lambda r=ref, t=transform: image(r, t)))  # type: ignore[misc]
    if keys.mask and example.mask:
        mask = example.mask
        entries.append(("mask", keys.mask, lambda: {"mask": _token_mask(mask, sample.transforms[0])}))
    return entries


def _prompt(sample: PlannedSample) -> Prompt:
    """The prompt with the images that the text encoder sees."""
    seen = zip(sample.example.controls, sample.views, strict=True)
    return Prompt(sample.example.prompt, images=tuple(view(load_rgb(ref)) for ref, view in seen if view))


def _encoded_text(sample: PlannedSample, prompt: Prompt, encoder: Encoder) -> TextEmbedding:
    try:
        return encoder.encode_text([prompt])[0]
    except DataError as error:
        raise DataError(f"{sample.example.name}: {error.problem}", error.remedy) from None


def _token_mask(mask: ImageRef, transform: Transform) -> Tensor:
    grey = transform(load_mask(mask), fill="black")
    return mask_to_tokens(torch.from_numpy(np.array(grey, dtype=np.float32))[None] / 255)[0]
