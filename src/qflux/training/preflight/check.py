"""`qflux check`: everything that can be known about a run before any weight is loaded, told at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.samples import read_samples, require_complete
from qflux.config import Config
from qflux.data.lint.inspect import Inspected
from qflux.data.noises import Noises
from qflux.errors import CacheError, CheckpointError, DataError, QfluxError
from qflux.launch import launched
from qflux.models.loading import FETCH
from qflux.models.pretrained import Pretrained
from qflux.models.registry import described, local_folder
from qflux.runs.paths import RunPaths
from qflux.training.preflight.fitting import LOOKED_AT, fitted
from qflux.training.preflight.probes import (
    Probe,
    checkpoint_bytes,
    require_room,
    settings_probes,
    trained_weights,
)

State = Literal["ok", "warning", "error", "unknown"]
_MOST = 10
"""Problems of the data that are told one by one."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: State
    detail: str
    remedy: str = ""


def check(
    config: Config, pretrained: Pretrained, store: EmbeddingCacheManager, inspected: Inspected
) -> Iterator[Check]:
    """Look at everything; what is wrong does not stop the look."""
    yield Check("device", "ok", f"{pretrained.device}, {config.model.dtype}")
    yield from _data(inspected, config)
    steps = inspected.summary.steps_per_epoch
    total = config.train.max_train_steps or steps * config.train.num_epochs
    if steps:
        noises = Noises.of(config)
        largest = max((sum(noises.tokens(sample) for sample in batch) for batch in inspected.batches), default=0)
        yield Check(
            "plan", "ok", f"{total:,} steps, {steps:,} in an epoch; the largest micro-batch: {largest:,} tokens"
        )
    goes_on = any(RunPaths(config.run_dir).checkpoints.glob("step-*"))
    for what, probe in settings_probes(config, pretrained.family, total, goes_on):
        yield _tried(what, probe)
    found = list(_checkpoint(pretrained))
    yield from found
    if not any(item.state == "error" for item in found):
        yield from _trained(config, pretrained)
        if steps:
            yield from _memory(config, pretrained, inspected)
        yield _cache(config, pretrained, store)


def _memory(config: Config, pretrained: Pretrained, inspected: Inspected) -> Iterator[Check]:
    """How the run would fit into the card that is there, or that `memory` speaks of."""
    if config.train.distributed == "fsdp" and launched().world_size == 1:
        yield Check("memory", "unknown", "it depends on how many processes share the model", "`fit` will say.")
        return
    noises = Noises.of(config)
    batches = [[noises.tokens(sample) for sample in batch] for batch in inspected.batches]
    together = config.train.gradient_accumulation_steps
    starts = range(0, len(batches), together)[:LOOKED_AT]
    steps = [batches[start : start + together] for start in starts]
    try:
        choice, predicted = fitted(config, pretrained.family, pretrained.device, steps)
    except CheckpointError as error:
        yield _not_known("memory", error, "`fit` will look again.")
    except QfluxError as error:
        yield Check("memory", "error", error.problem, error.remedy)
    else:
        if predicted is not None:
            yield Check("memory", "ok", predicted.described(choice))


def _data(inspected: Inspected, config: Config) -> Iterator[Check]:
    summary = inspected.summary
    if not summary.training and not any(sample.images is None for sample in inspected.dataset.training):
        yield Check("data", "error", "there is no sample to train on", "`qflux inspect` shows what is wrong.")
    else:
        found = f"{summary.training} samples, {len(summary.sizes)} sizes, {summary.held_out} held out"
        yield Check("data", "ok", found)
    fatal = {fault.what: fault.remedy for fault in inspected.dataset.faults if fault.is_fatal}
    errors = [finding for finding in summary.findings if finding.level == "error"]
    if config.data.on_bad_sample == "skip":
        stopping = [finding for finding in errors if finding.what in fatal or finding.kind == "too large"]
        if len(errors) > len(stopping):
            skipped = len(errors) - len(stopping)
            yield Check(
                "data", "warning", f"{skipped} samples can't be used and are skipped", "`qflux inspect` shows why."
            )
        errors = stopping
    for finding in errors[:_MOST]:
        remedy = fatal.get(finding.what) or "fix it, or set data.on_bad_sample: skip."
        if finding.kind == "too large":
            remedy = "raise data.max_tokens, or choose smaller areas in data.processor."
        yield Check("data", "error", f"{finding.what}: {finding.detail}", remedy)
    if len(errors) > _MOST:
        yield Check("data", "error", f"{len(errors) - _MOST} more", "`qflux inspect` lists them all.")
    warnings = summary.count("warning")
    if warnings:
        yield Check("data", "warning", f"probably not meant: {warnings}", "`qflux inspect` shows them.")


def _checkpoint(pretrained: Pretrained) -> Iterator[Check]:
    """What its checkpoint says of itself; of one on this machine, that its parts are there and of the family."""
    family, folder = pretrained.family, local_folder(pretrained.settings.pretrained)
    try:
        pretrained.require_family()
    except QfluxError as error:  # whatever else could be said would be about another family's parts
        yield Check("model", "error", error.headline, error.remedy)
        return
    caution = family.facts.of(described(pretrained.settings.pretrained)).caution
    if caution:
        yield Check("model", "warning", *caution)
    if not folder.is_dir():
        return
    for part in ("scheduler", "transformer", *family.text_parts, *family.image_parts):
        is_model = not part.startswith(("tokenizer", "scheduler", "processor"))
        if not (folder / part).is_dir() and part in family.optional_parts:
            continue
        if not (folder / part).is_dir():
            yield Check("model", "error", f"{folder} has no folder {part}/", "give a checkpoint in diffusers format.")
        elif is_model and not any((folder / part).glob("*.safetensors")):
            yield Check("model", "error", f"{folder / part} holds no .safetensors file", "fetch the checkpoint again.")
    try:
        pretrained.text_counter()
    except QfluxError as error:
        yield Check("model", "error", error.headline, error.remedy)


def _trained(config: Config, pretrained: Pretrained) -> Iterator[Check]:
    """The layers that train, from the transformer's description, and the disk their checkpoints take."""
    try:
        trained = trained_weights(config, pretrained.family)
    except QfluxError as error:
        yield _not_known("model", error, "`fit` will look again.")
        return
    yield Check("model", "ok", f"{config.model.pretrained}: {trained:,} weights train ({config.train.method})")
    yield _tried("disk", lambda: require_room(config.run_dir, checkpoint_bytes(config, trained)))


def _cache(config: Config, pretrained: Pretrained, store: EmbeddingCacheManager) -> Check:
    if not config.cache.use_cache:
        return Check("cache", "ok", "not used: samples are encoded whenever they train")
    place = _tried("cache", lambda: require_room(config.cache_dir, 0))
    if place.state == "error":
        return place
    try:
        require_complete(read_samples(config, pretrained.family, store), store, config)
    except CacheError as error:
        return Check("cache", "warning", error.headline, "run `qflux cache` before `qflux fit`.")
    except DataError:
        return Check("cache", "unknown", "the data have to be fixed first")
    except QfluxError as error:
        return _not_known("cache", error, "run `qflux cache` before `qflux fit`.")
    return Check("cache", "ok", f"complete: {store.root}")


def _not_known(what: str, error: QfluxError, remedy: str) -> Check:
    """A hub that can't be reached now says nothing about a run; everything else that fails would fail then."""
    problem = error.headline
    return Check(what, "unknown", problem, remedy) if FETCH in problem else Check(what, "error", problem, error.remedy)


def _tried(what: str, probe: Probe) -> Check:
    try:
        return Check(what, "ok", probe())
    except QfluxError as error:
        return Check(what, "error", error.problem, error.remedy)
