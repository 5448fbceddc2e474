"""Everything that can be known about a run before any weight is loaded: what `qflux check` says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from qflux.adapters.lora import inject
from qflux.data.inspect import Inspected
from qflux.errors import CacheError, CheckpointError, QfluxError
from qflux.models.loading import empty_transformer
from qflux.models.quantization import quantization_config
from qflux.training.encode import plan_samples, require_complete
from qflux.training.optim import build_optimizer, build_schedule
from qflux.training.trackers import require_trackers
from qflux.training.trainer import Trainer

State = Literal["ok", "warning", "error", "unknown"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: State
    detail: str
    remedy: str = ""


def check(trainer: Trainer, progress: Callable[[str, int, int], None] | None = None) -> Iterator[Check]:
    """Look at everything; what is wrong does not stop the look."""
    config = trainer.config
    yield Check("device", "ok", f"{trainer.device}, {config.model.dtype}")
    inspected = trainer.inspect(progress)
    yield from _data(inspected)
    steps = inspected.summary.steps_per_epoch
    total = config.train.max_train_steps or steps * config.train.num_epochs
    if steps:
        largest = max((sum(map(inspected_tokens(inspected), batch)) for batch in _batches(inspected)), default=0)
        yield Check(
            "plan", "ok", f"{total:,} steps, {steps:,} in an epoch; the largest micro-batch: {largest:,} tokens"
        )
    yield _tried(
        "optimizer",
        lambda: build_schedule(
            config.train, build_optimizer(config.optimizer, [nn.Parameter(torch.zeros(1, 1))]), max(1, total)
        ),
        f"{config.optimizer.class_path}, {config.train.lr_scheduler}",
    )
    if config.train.trackers:
        yield _tried("trackers", lambda: require_trackers(config), ", ".join(config.train.trackers))
    quantization = config.model.quantization
    if quantization:
        yield _tried("quantization", lambda: quantization_config(quantization, torch.bfloat16), quantization)
    yield from _trained(trainer)
    yield _cache(trainer)


def inspected_tokens(inspected: Inspected) -> Callable[[int], int]:
    """Tokens of a sample, text and images, by its number."""
    samples = inspected.samples.all
    return lambda number: inspected.text_tokens[number] + samples[number].image_tokens


def _batches(inspected: Inspected) -> Iterator[list[int]]:
    for step in inspected.plan or ():
        for rank in step.ranks:
            yield from ([visit.sample for visit in batch] for batch in rank if batch)


def _data(inspected: Inspected) -> Iterator[Check]:
    summary = inspected.summary
    found = f"{summary.training} samples, {len(summary.sizes)} sizes, {summary.held_out} held out"
    stored = len(inspected.samples.stored)
    if not summary.training and not stored:
        yield Check("data", "error", "there is no sample to train on", "`qflux inspect` shows what is wrong.")
    else:
        yield Check("data", "ok", found)
    errors = [finding for finding in summary.findings if finding.level == "error"]
    for finding in errors[:10]:
        yield Check("data", "error", f"{finding.what}: {finding.detail}", "mend it, or data.on_bad_sample: skip.")
    if len(errors) > 10:
        yield Check("data", "error", f"{len(errors) - 10} more", "`qflux inspect` lists them all.")
    warnings = summary.count("warning")
    if warnings:
        yield Check("data", "warning", f"{warnings} things that are probably not meant", "`qflux inspect` shows them.")


def _trained(trainer: Trainer) -> Iterator[Check]:
    """The layers that train, from the transformer's description, and the disk their checkpoints take."""
    config = trainer.config
    try:
        with torch.device("meta"):
            transformer = empty_transformer(trainer.family.transformer, config.model)
            if config.train.method == "lora":
                inject(transformer, config.lora, config.seed)
    except CheckpointError as error:
        fetched = "can't be fetched" in error.problem  # a hub that can't be reached now says nothing about the run
        state: State = "unknown" if fetched else "error"
        yield Check(
            "model", state, error.problem.splitlines()[0], "`fit` will look again." if fetched else error.remedy
        )
        return
    except QfluxError as error:
        yield Check("model", "error", error.problem, error.remedy)
        return
    trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad or config.train.method == "full")
    yield Check("model", "ok", f"{config.model.pretrained}: {trained:,} weights train ({config.train.method})")
    copies = 1 + 2 + (config.train.ema is not None)
    needed = 4 * trained * copies * (config.train.keep_checkpoints + 2)
    free = shutil.disk_usage(_existing(config.run_dir)).free
    state = "ok" if free > needed else "error"
    detail = f"checkpoints take up to {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free"
    yield Check("disk", state, detail, "" if state == "ok" else "free some space, or lower train.keep_checkpoints.")


def _cache(trainer: Trainer) -> Check:
    config = trainer.config
    if not config.cache.use_cache:
        return Check("cache", "ok", "not used: samples are encoded whenever they train")
    try:
        require_complete(plan_samples(config, trainer.family, trainer.store), trainer.store, config)
    except CacheError as error:
        return Check("cache", "warning", error.problem.splitlines()[0], "run `qflux cache` before `qflux fit`.")
    except QfluxError as error:
        return Check("cache", "unknown", error.problem.splitlines()[0], "run `qflux cache` before `qflux fit`.")
    return Check("cache", "ok", f"complete: {trainer.store.root}")


def _tried(what: str, action: Callable[[], object], detail: str) -> Check:
    try:
        action()
    except QfluxError as error:
        return Check(what, "error", error.problem, error.remedy)
    return Check(what, "ok", detail)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
