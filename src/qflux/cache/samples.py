"""The samples of a config with their places in the cache: what is there, what is missing, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qflux.cache.cache import RECACHE, CachedEmbeddings, EmbeddingCacheManager
from qflux.cache.keys import KeyMaker, Manifest, SampleKeys
from qflux.cache.stored import StoredEmbeddings, read_stored
from qflux.config import Config
from qflux.data.dataset import Dataset, Progress, gather, require_usable
from qflux.data.encoded import COMPLETE, NO_CAPTION, Variant
from qflux.data.sample import Sample
from qflux.errors import CacheError, CheckpointError, DataError, collected, redacted
from qflux.models.family import Family, InputWidths, TextCount, TextCounter, text_limit
from qflux.models.loading import checkpoint_folder, identity, layer_identity
from qflux.models.projection import projection_weights


def read_samples(
    config: Config,
    family: Family,
    store: EmbeddingCacheManager,
    progress: Progress | None = None,
    fetch_encoders: bool = False,
) -> Dataset:
    """The samples of a config with their places in the cache; no image is decoded.

    Without `fetch_encoders`, encoders that are not on this machine are known by what the cache remembers of them.
    """
    dataset = gather(config.data, family, store.index, read_stored, progress)
    require_usable(dataset, config.data)
    if dataset.from_images:
        text, image, *projection = encoder_identities(config, family, store, fetch_encoders)
        limit = text_limit(config, family).tokens
        keys = KeyMaker(family.name, config.model.dtype, limit, text, image, *projection)
        trained, validated = training_variants(config), held_out_variants(config)
        dataset.training = [_placed(sample, store, keys, trained) for sample in dataset.training]
        dataset.held_out = [_placed(sample, store, keys, validated) for sample in dataset.held_out]
    store.index.save()
    stored = [s for s in dataset.training if s.images is None]
    apart = [s for s in dataset.held_out if s.images is None]
    _require_variants(stored, training_variants(config), "train.caption_dropout and train.control_dropout to 0")
    _require_variants(apart, held_out_variants(config), "validation.true_cfg_scale to 1")
    dataset.training.sort(key=lambda sample: (sample.id, sample.is_prior))
    return dataset


def _placed(sample: Sample, store: EmbeddingCacheManager, keys: KeyMaker, variants: Sequence[Variant]) -> Sample:
    if sample.images is None:
        return sample
    return replace(sample, embeddings=CachedEmbeddings(store, keys(sample, variants)))


def keys_of(sample: Sample) -> SampleKeys:
    """Where the entries of a sample that is made from images belong."""
    assert isinstance(sample.embeddings, CachedEmbeddings), f"{sample.name} has no place in a cache"
    return sample.embeddings.keys


def training_variants(config: Config) -> list[Variant]:
    """What dropout may leave of a sample; the complete sample first."""
    captions = (True, False) if config.train.caption_dropout or config.loss.preserve.blank else (True,)
    controls = (True, False) if config.train.control_dropout else (True,)
    return [Variant(caption, control) for control in controls for caption in captions]


def held_out_variants(config: Config) -> list[Variant]:
    """What validation shows of a sample: all of it, and guidance is against the empty prompt."""
    guided = config.validation.images > 0 and config.validation.true_cfg_scale > 1
    return [COMPLETE, NO_CAPTION] if guided else [COMPLETE]


def _require_variants(stored: Sequence[Sample], variants: Sequence[Variant], remedy: str) -> None:
    for sample in stored:
        assert isinstance(sample.embeddings, StoredEmbeddings)
        captions = len(sample.captions)
        needed = (one for variant in variants for one in variant.of_captions(captions))
        missing = [variant for variant in needed if variant not in sample.embeddings.variants]
        if missing:
            raise CacheError(
                f"{sample.place}: no embedding {missing[0].name} is stored, and this config needs one",
                f"set {remedy}, or encode the images again.",
            )


def encoder_identities(config: Config, family: Family, store: EmbeddingCacheManager, fetch: bool) -> list[str]:
    """What text and image encoders are known by, and the layer that text is put through, if there is one.

    A hash of their files, or what the cache remembers of it.
    """
    parts = (*family.text_parts, *family.image_parts)
    try:
        folder = checkpoint_folder(config.model.pretrained, parts, download=fetch)
        projection = projection_identity(config, fetch)
    except CheckpointError:
        remembered = store.encoders(encoders_name(config))
        if fetch or remembered is None or len(remembered) not in (2, 3):
            raise
        return remembered
    encoders = [identity(folder, kind, store.index.hash_of) for kind in (family.text_parts, family.image_parts)]
    return [*encoders, projection] if projection else encoders


def projection_identity(config: Config, fetch: bool = True) -> str | None:
    """What the layer is known by that text of this config is put through before it is kept; none if it is not."""
    weights = projection_weights(config, fetch)
    return layer_identity(weights) if weights else None


def encoders_name(config: Config) -> str:
    """What the encoders of a config are remembered as."""
    how = f", projected by {config.model.transformer or 'its transformer'}" if config.projects_text else ""
    return redacted(f"{config.model.pretrained} ({config.family}{how})")


def circumstances(config: Config) -> str:
    """Settings that decide whether a sample can be encoded, and that its embeddings do not depend on."""
    return f"on_long_prompt: {config.model.on_long_prompt}"


def is_refused(manifest: Manifest, config: Config) -> bool:
    """The sample is in the cache, but was made under a setting that this config does not share."""
    return manifest.is_cut and config.model.on_long_prompt == "error"


def require_complete(dataset: Dataset, store: EmbeddingCacheManager, config: Config) -> None:
    """An error that names the samples whose embeddings are missing; those known to be unusable may be left out.

    The samples learn how long their prompts are.
    """
    missing, is_known = [], False
    samples = dataset.from_images
    lengths: dict[int, int] = {}
    for sample in samples:
        keys = keys_of(sample)
        manifest = store.manifest(keys)
        if manifest is not None and not is_refused(manifest, config):
            lengths[id(sample)] = manifest.text_tokens
            continue
        reason = store.failure(keys, circumstances(config))
        if manifest is not None:
            reason = "its prompt is longer than allowed and was cut, and model.on_long_prompt is error"
        if reason and config.data.on_bad_sample == "skip":
            dataset.drop(sample, reason)
        else:
            is_known = is_known or reason is not None
            lacking = ", ".join(sorted({kind for kind, _ in store.missing_entries(keys)})) or "its manifest"
            missing.append(f"{sample.name}: {reason or f'{lacking} missing'}")
    if missing:
        raise collected(
            CacheError,
            f"{len(missing)} of {len(samples)} samples are not in the cache {store.root}",
            missing,
            "fix what can't be encoded, or set data.on_bad_sample: skip." if is_known else RECACHE,
        )
    if not dataset.training:
        raise DataError(f"no usable sample: all {len(samples)} could not be encoded", "`qflux inspect` shows why.")
    for kind in (dataset.training, dataset.held_out):
        kind[:] = [replace(s, text_tokens=lengths[id(s)]) if id(s) in lengths else s for s in kind]


def count_text(dataset: Dataset, count: TextCounter) -> None:
    """Count the prompts of samples that are not in the cache: what training without one goes by."""
    for kind in (dataset.training, dataset.held_out):
        kind[:] = [
            replace(s, text_tokens=longest_text(s, count).used) if s.images and s.text_tokens is None else s
            for s in kind
        ]


def longest_text(sample: Sample, count: TextCounter) -> TextCount:
    """The length of the longest of a sample's captions, in tokens."""
    # Where there is a second prompt, the encoder whose tokens the transformer sees reads that one.
    texts = (sample.prompt_2,) if sample.prompt_2 is not None else sample.captions
    return max((count(text, sample.sizes) for text in texts), key=lambda counted: (counted.wanted, counted.used))


def require_fitting(dataset: Dataset, widths: InputWidths, config: Config) -> None:
    """An error if samples that were found encoded are for another model; the first of each source is looked at."""
    stored = [sample for sample in reversed(dataset.all) if sample.images is None]
    projection = projection_identity(config) if stored else None
    for sample in {sample.source: sample for sample in stored}.values():
        assert isinstance(sample.embeddings, StoredEmbeddings)
        projected, encoded = sample.embeddings.projected, sample.embeddings.load(COMPLETE)
        for what, tensor, expected in (
            ("text tokens", encoded.text.tokens, widths.projected_text if projected else widths.text),
            ("a pooled text", encoded.text.pooled, widths.pooled),
            ("image tokens", encoded.target, widths.image),
        ):
            found = None if tensor is None else tensor.shape[-1]
            if found != expected:
                raise CacheError(
                    f"{sample.place}: {what} of {found} channels; the transformer takes {expected}",
                    "is this the cache of another model?",
                )
        placed, controls = len(encoded.text.places), len(encoded.controls)
        if widths.has_places and placed != controls:
            raise CacheError(
                f"{sample.place}: its text says where {placed} controls stand, and it has {controls}",
                "encode the images again: this model has them inside the text.",
            )
        _require_projection(sample.place, projected.layer if projected else None, projection)


def _require_projection(place: str, found: str | None, wanted: str | None) -> None:
    """All text of a run is projected by its own transformer, or none."""
    if found == wanted:
        return
    if found is None:
        raise CacheError(
            f"{place}: its text is kept as it was encoded, and this run takes it projected",
            "set cache.project_text: false here too.",
        )
    remedy = "encode it again with cache.project_text: false, which every run can take."
    if wanted is None:
        raise CacheError(
            f"{place}: its text is kept projected, and this run needs it before (cache.project_text is false, or the "
            "projection trains or is quantized)",
            remedy,
        )
    raise CacheError(f"{place}: its text was projected by another transformer than this run's", remedy)
