"""Samples and their embeddings: where they belong in the cache, what is missing, how one is made.

`fill` makes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qflux.cache.cache import RECACHE, EmbeddingCacheManager, Manifest, SampleKeys
from qflux.cache.stored import StoredSample
from qflux.cache.tensor_file import VERSION
from qflux.config import Config
from qflux.data.dataset import Progress, SizedExample, gather, require_usable
from qflux.data.encoded import WHOLE, EncodedExample, Prompt, TextEmbedding, Variant
from qflux.data.images.decode import load_mask, load_rgb
from qflux.data.images.pixels import to_pixels
from qflux.data.sources.listing import Fault
from qflux.errors import CacheError, CheckpointError, DataError, collected, redacted
from qflux.files.hashing import key_of
from qflux.models.family import Encoder, Family, text_limit
from qflux.models.loading import checkpoint_folder, identity
from qflux.models.patches import mask_to_tokens


@dataclass(frozen=True)
class PlannedSample(SizedExample):
    """A sample that also knows where its embeddings belong."""

    keys: SampleKeys

    @property
    def has_mask(self) -> bool:
        return self.mask_hash is not None

    @property
    def address(self) -> str:
        """Changes with the embeddings."""
        return self.keys.key


TrainingSample = PlannedSample | StoredSample
"""What the loop trains on: encoded from images, or found encoded."""


@dataclass
class PlannedSet:
    """The samples of a config."""

    training: list[TrainingSample]
    """In the order of their ids."""
    held_out: list[TrainingSample]
    faults: list[Fault]
    """What is left out, and why."""
    encoders: list[str] = field(default_factory=list)
    """What the text and image encoders are known by."""
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """Of the samples that are in the cache, by address."""

    @property
    def all(self) -> list[TrainingSample]:
        return [*self.training, *self.held_out]

    @property
    def from_images(self) -> list[PlannedSample]:
        """Those that have to be encoded."""
        return [sample for sample in self.all if isinstance(sample, PlannedSample)]

    def drop(self, sample: TrainingSample, reason: str) -> None:
        """Leave a sample out."""
        self.training = [other for other in self.training if other is not sample]
        self.held_out = [other for other in self.held_out if other is not sample]
        self.faults.append(Fault(sample.example.name, reason, source=sample.example.source))


def plan_samples(
    config: Config,
    family: Family,
    cache: EmbeddingCacheManager,
    progress: Progress | None = None,
    fetch_encoders: bool = False,
) -> PlannedSet:
    """The samples of a config with their places in the cache; no image is decoded.

    Without `fetch_encoders`, encoders that are not on this machine are known by what the cache remembers of them.
    """
    gathered = gather(config.data, family, cache.index, progress)
    require_usable(gathered, config.data)
    keys = _KeyMaker(config, family, cache, fetch_encoders) if any(gathered.all) else None

    def planned(samples: Sequence[SizedExample], variants: list[Variant]) -> list[PlannedSample]:
        return [PlannedSample(**vars(sample), keys=keys(sample, variants)) for sample in samples] if keys else []

    cache.index.save()
    trained, validated = variants_of(config), held_out_variants(config)
    training: list[TrainingSample] = [*planned(gathered.training, trained), *gathered.stored]
    held_out: list[TrainingSample] = [*planned(gathered.held_out, validated), *gathered.stored_held_out]
    _require_variants(gathered.stored, trained, "train.caption_dropout and train.control_dropout to 0")
    _require_variants(gathered.stored_held_out, validated, "validation.true_cfg_scale to 1")
    ordered = sorted(training, key=lambda sample: (sample.id, sample.example.is_prior))
    return PlannedSet(ordered, held_out, gathered.faults, keys.encoders if keys else [])


def variants_of(config: Config) -> list[Variant]:
    """What dropout may leave of a sample; the whole sample first."""
    captions = (True, False) if config.train.caption_dropout else (True,)
    controls = (True, False) if config.train.control_dropout else (True,)
    return [Variant(caption, control) for control in controls for caption in captions]


def held_out_variants(config: Config) -> list[Variant]:
    """What validation shows of a sample: all of it, and guidance is against the empty prompt."""
    guided = config.validation.images > 0 and config.validation.true_cfg_scale > 1
    return [WHOLE, Variant(caption=False)] if guided else [WHOLE]


def _require_variants(stored: Sequence[StoredSample], variants: list[Variant], remedy: str) -> None:
    for sample in stored:
        missing = [variant for variant in variants if variant not in sample.variants]
        if missing:
            raise CacheError(
                f"{sample.example.target}: no embedding {missing[0].name} is stored, and this config needs one",
                f"set {remedy}, or encode the images again.",
            )


class _KeyMaker:
    """The cache keys of a sample: everything its entries are made from, and nothing else."""

    def __init__(self, config: Config, family: Family, cache: EmbeddingCacheManager, fetch: bool) -> None:
        self._family = family.name
        self._dtype = config.model.dtype
        self._length = text_limit(config, family).tokens
        self.encoders = _encoder_identities(config, family, cache, fetch)
        self._text_identity, self._image_identity = self.encoders

    def __call__(self, sample: SizedExample, variants: Sequence[Variant]) -> SampleKeys:
        target = sample.transforms[0].key
        return SampleKeys(
            id=sample.id,
            texts=tuple((variant, self._text(sample, variant)) for variant in variants),
            images=tuple(
                key_of("image", VERSION, fact.hash, transform.key, self._image_identity, self._dtype)
                for fact, transform in zip(sample.facts, sample.transforms, strict=True)
            ),
            img_shapes=sample.img_shapes,
            mask=key_of("mask", VERSION, sample.mask_hash, target) if sample.mask_hash else None,
        )

    def _text(self, sample: SizedExample, variant: Variant) -> str:
        controls = zip(sample.facts[1:], sample.views, strict=True) if variant.controls else ()
        seen = [(fact.hash, view.key) for fact, view in controls if view]
        # Until 0.1.0 the limit counted the tokens of images too, and long prompts with images were cut differently.
        limit = [self._length, "words"] if seen else self._length
        prompt = (self._family, sample.example.prompt if variant.caption else "", seen, limit)
        return key_of("text", VERSION, prompt, self._text_identity, self._dtype)


def _encoder_identities(config: Config, family: Family, cache: EmbeddingCacheManager, fetch: bool) -> list[str]:
    """What text and image encoders are known by: a hash of their files, or what the cache remembers of it."""
    parts = (*family.text_parts, *family.image_parts)
    try:
        folder = checkpoint_folder(config.model.pretrained, parts, download=fetch)
    except CheckpointError:
        remembered = cache.encoders(encoders_name(config))
        if fetch or remembered is None or len(remembered) != 2:
            raise
        return remembered
    return [identity(folder, kind, cache.index.hash_of) for kind in (family.text_parts, family.image_parts)]


def encoders_name(config: Config) -> str:
    """What the encoders of a config are remembered as."""
    return redacted(f"{config.model.pretrained} ({config.family})")


def circumstances(config: Config) -> str:
    """Settings that decide whether a sample can be encoded, and that its embeddings do not depend on."""
    return f"on_long_prompt: {config.model.on_long_prompt}"


def is_refused(manifest: Manifest, config: Config) -> bool:
    """The sample is in the cache, but was made under a setting that this config does not share."""
    return manifest.is_cut and config.model.on_long_prompt == "error"


def require_complete(planned: PlannedSet, cache: EmbeddingCacheManager, config: Config) -> None:
    """An error that names the samples whose embeddings are missing; those known to be unusable may be left out."""
    missing, known = [], False
    samples = planned.from_images
    for sample in samples:
        manifest = cache.manifest(sample.keys)
        if manifest is not None and not is_refused(manifest, config):
            planned.manifests[sample.address] = manifest
            continue
        reason = cache.failure(sample.keys, circumstances(config))
        if manifest is not None:
            reason = "its prompt is longer than allowed and was cut, and model.on_long_prompt is error"
        if reason and config.data.on_bad_sample == "skip":
            planned.drop(sample, reason)
        else:
            known = known or reason is not None
            entries = cache.missing_entries(sample.keys)
            lacking = ", ".join(sorted({kind for kind, _ in entries})) or "its manifest"
            missing.append(f"{sample.example.name}: {reason or f'{lacking} missing'}")
    if missing:
        raise collected(
            CacheError,
            f"{len(missing)} of {len(samples)} samples are not in the cache {cache.root}",
            missing,
            "mend what can't be encoded, or set data.on_bad_sample: skip." if known else RECACHE,
        )
    if not planned.training:
        raise DataError(f"no usable sample: all {len(samples)} could not be encoded", "`qflux inspect` shows why.")


def require_fitting(planned: PlannedSet, transformer: Any) -> None:
    """An error if samples that were found encoded are for another model; the first of each source is looked at."""
    config = transformer.config
    for sample in {s.example.source: s for s in reversed(planned.all) if isinstance(s, StoredSample)}.values():
        encoded = sample.load(WHOLE)
        for what, tensor, name in (
            ("text tokens", encoded.text.tokens, "joint_attention_dim"),
            ("a pooled text", encoded.text.pooled, "pooled_projection_dim"),
            ("image tokens", encoded.latents[0], "in_channels"),
        ):
            expected = getattr(config, name, None)
            found = None if tensor is None else tensor.shape[-1]
            if found != expected:
                raise CacheError(
                    f"{sample.example.target}: {what} of {found} channels; the transformer takes {expected}",
                    "is this the cache of another model?",
                )


@dataclass(frozen=True)
class OpenedExample:
    """A sample as its encoders need it: decoded, at its sizes, not encoded yet."""

    sample: PlannedSample
    images: tuple[Tensor, ...]
    """Pixels `(3, H, W)` in [-1, 1], target first."""
    prompt: Prompt
    mask: Tensor | None


def open_example(sample: PlannedSample, variant: Variant = WHOLE) -> OpenedExample:
    """Read and transform the images of a sample."""
    shown = len(sample.facts) if variant.controls else 1
    images = tuple(open_image(sample, number) for number in range(shown))
    return OpenedExample(sample, images, open_prompt(sample, variant), open_mask(sample))


def encode_example(opened: OpenedExample, encoder: Encoder) -> EncodedExample:
    """The same as the cache holds, made now."""
    return EncodedExample(
        id=opened.sample.id,
        text=encode_prompt(opened.sample, opened.prompt, encoder),
        latents=tuple(encoder.encode_images([pixels])[0] for pixels in opened.images),
        img_shapes=opened.sample.img_shapes[: len(opened.images)],
        mask=opened.mask,
    )


def open_image(sample: PlannedSample, number: int) -> Tensor:
    """Image `number` of a sample, target first: pixels `(3, H, W)` in [-1, 1] at training size."""
    ref, facts = sample.example.images[number], sample.facts[number]
    return to_pixels(sample.transforms[number](load_rgb(ref, facts.hash)))


def open_prompt(sample: PlannedSample, variant: Variant = WHOLE) -> Prompt:
    """The prompt with the images that the text encoder sees."""
    controls = zip(sample.example.controls, sample.facts[1:], sample.views, strict=True) if variant.controls else ()
    images = tuple(view(load_rgb(ref, facts.hash)) for ref, facts, view in controls if view)
    return Prompt(sample.example.prompt if variant.caption else "", images=images)


def open_mask(sample: PlannedSample) -> Tensor | None:
    """The mask in token space."""
    if sample.example.mask is None:
        return None
    grey = sample.transforms[0](load_mask(sample.example.mask, sample.mask_hash), fill="black")
    return mask_to_tokens(torch.from_numpy(np.array(grey, dtype=np.float32))[None] / 255)[0]


def encode_prompt(sample: PlannedSample, prompt: Prompt, encoder: Encoder) -> TextEmbedding:
    """The prompt of a sample; an error names the sample."""
    try:
        return encoder.encode_text([prompt])[0]
    except DataError as error:
        raise DataError(f"{sample.example.name}: {error.problem}", error.remedy) from None
