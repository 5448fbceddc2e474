"""`qflux cache`: the samples of a config become embeddings on disk."""

from __future__ import annotations

import logging

from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.filler import CacheFiller, CacheReport, Estimate, Listener
from qflux.cache.samples import (
    circumstances,
    encoder_identities,
    encoders_name,
    is_refused,
    keys_of,
    read_samples,
)
from qflux.config import Config
from qflux.data.dataset import Dataset
from qflux.errors import DataError, collected
from qflux.files.locks import Claims
from qflux.models.pretrained import Pretrained

__all__ = ["CacheReport", "Estimate", "Listener", "build_cache"]

logger = logging.getLogger(__name__)


def build_cache(
    config: Config, pretrained: Pretrained, store: EmbeddingCacheManager, listener: Listener | None = None
) -> CacheReport:
    """Encode every sample of a config that is not in the cache yet. Several processes may do this at the same time."""
    family, facts, width = pretrained.family, pretrained.facts, pretrained.dtype.itemsize
    claims = Claims(store.root)
    try:
        with claims.turn():  # the first one reads the images' headers, the others its index
            dataset = read_samples(config, family, store, fetch_encoders=True)
        filler = CacheFiller(
            store,
            pretrained.encoder,
            ((facts.width if config.projects_text else facts.text_channels) * width, facts.image_channels * width),
            config.cache.batch_size,
            config.data.num_workers,
            listener,
            circumstances(config),
        )
        with claims.sharing() as staging:
            known = encoder_identities(config, family, store, fetch=False) if dataset.from_images else None
            if known:
                store.remember_encoders(encoders_name(config), known, staging)
            report = filler.fill(dataset.from_images, pretrained.text_limit.tokens, claims, staging)
        _refuse_cut_prompts(dataset, store, config, report)
    finally:
        claims.close()
    report.skipped = [*map(str, dataset.faults), *report.failed]
    if listener:
        listener.finished(report)
    if report.failed and config.data.on_bad_sample == "error":
        raise collected(
            DataError,
            f"{len(report.failed)} of {len(dataset.all)} samples can't be encoded; the others are cached",
            report.failed,
            "fix them, or set data.on_bad_sample: skip to train without them.",
        )
    for reason in report.failed:
        logger.warning("skipped: %s", reason)
    return report


def _refuse_cut_prompts(dataset: Dataset, store: EmbeddingCacheManager, config: Config, report: CacheReport) -> None:
    """Count prompts that were cut; those that only an earlier run with another setting has cut are failures."""
    for sample in dataset.from_images:
        manifest = store.manifest(keys_of(sample))
        report.cut += manifest is not None and manifest.is_cut
        if manifest is not None and is_refused(manifest, config):
            report.samples -= 1
            report.failed.append(f"{sample.name}: its prompt is longer than allowed, and was cut")
