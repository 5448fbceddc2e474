"""Everything that can be known about a run before any weight is loaded: what `qflux check` says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from qflux.adapters.files import read_adapter
from qflux.adapters.lora import inject
from qflux.commands import Trainer
from qflux.config import Config
from qflux.data.images.decode import ImageFile, read_facts
from qflux.data.lint.inspect import Inspected
from qflux.errors import CacheError, DataError, QfluxError
from qflux.models.loading import empty_transformer
from qflux.models.precision import quantization_config
from qflux.models.shipped import local_folder
from qflux.runs.trackers import require_trackers
from qflux.training.encode import plan_samples, require_complete
from qflux.training.optimizer.build import build_optimizer, build_schedule

FETCH = "can't be fetched"
"""What `checkpoint_folder` says of a hub id that is not here."""

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
    yield from _data(inspected, config)
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
    for edit in config.validation.edits:
        for path in edit.images:
            yield _tried("edits", partial(read_facts, ImageFile(path)), f"validation.edits: {path}")
    start = config.lora.init_from if config.train.method == "lora" else None
    if start and not any((config.run_dir / "checkpoints").glob("step-*")):  # a run that goes on does not need it
        yield _tried("start", lambda: read_adapter(start).require_family(trainer.family), f"lora.init_from: {start}")
    yield from _checkpoint(trainer)
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


def _data(inspected: Inspected, config: Config) -> Iterator[Check]:
    summary = inspected.summary
    if not summary.training and not inspected.samples.stored:
        yield Check("data", "error", "there is no sample to train on", "`qflux inspect` shows what is wrong.")
    else:
        found = f"{summary.training} samples, {len(summary.sizes)} sizes, {summary.held_out} held out"
        yield Check("data", "ok", found)
    fatal = {fault.what: fault.remedy for fault in inspected.samples.faults if fault.is_fatal}
    errors = [finding for finding in summary.findings if finding.level == "error"]
    if config.data.on_bad_sample == "skip":
        stopping = [finding for finding in errors if finding.what in fatal or finding.kind == "too large"]
        if len(errors) > len(stopping):
            skipped = len(errors) - len(stopping)
            yield Check(
                "data", "warning", f"{skipped} samples can't be used and are skipped", "`qflux inspect` shows why."
            )
        errors = stopping
    for finding in errors[:10]:
        remedy = fatal.get(finding.what) or "mend it, or set data.on_bad_sample: skip."
        if finding.kind == "too large":
            remedy = "raise data.max_tokens, or choose smaller areas in data.processor."
        yield Check("data", "error", f"{finding.what}: {finding.detail}", remedy)
    if len(errors) > 10:
        yield Check("data", "error", f"{len(errors) - 10} more", "`qflux inspect` lists them all.")
    warnings = summary.count("warning")
    if warnings:
        yield Check("data", "warning", f"{warnings} things that are probably not meant", "`qflux inspect` shows them.")


def _checkpoint(trainer: Trainer) -> Iterator[Check]:
    """The parts of a checkpoint that is on this machine: that they are there, and those of the family."""
    family, folder = trainer.family, local_folder(trainer.config.model.pretrained)
    if not folder.is_dir():
        return
    for part in ("scheduler", "transformer", *family.text_parts, *family.image_parts):
        is_model = not part.startswith(("tokenizer", "scheduler", "processor"))
        if not (folder / part).is_dir():
            yield Check("model", "error", f"{folder} has no folder {part}/", "give a checkpoint in diffusers format.")
        elif is_model and not any((folder / part).glob("*.safetensors")):
            yield Check("model", "error", f"{folder / part} holds no .safetensors file", "fetch the checkpoint again.")
    try:
        described = json.loads((folder / "transformer" / "config.json").read_text()).get("_class_name")
    except (OSError, ValueError, AttributeError):
        described = None
    wanted = family.transformer.__name__
    if described not in (None, wanted):
        detail = f"{folder} has a {described}, {family.name} needs a {wanted}"
        yield Check("model", "error", detail, "set family to the one the checkpoint is of.")
    try:
        trainer.text_counter()
    except QfluxError as error:
        yield Check("model", "error", error.headline, error.remedy)


def _trained(trainer: Trainer) -> Iterator[Check]:
    """The layers that train, from the transformer's description, and the disk their checkpoints take."""
    config = trainer.config
    try:
        with torch.device("meta"):
            transformer = empty_transformer(trainer.family.transformer, config.model)
            if config.train.method == "lora":
                inject(transformer, config.lora, config.seed)
    except QfluxError as error:
        yield _not_known("model", error, "`fit` will look again.")
        return
    trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad or config.train.method == "full")
    yield Check("model", "ok", f"{config.model.pretrained}: {trained:,} weights train ({config.train.method})")
    copies = 1 + 2 + (config.train.ema is not None)
    yield _folder("disk", config.run_dir, 4 * trained * copies * (config.train.keep_checkpoints + 2))


def _folder(what: str, folder: Path, needed: int) -> Check:
    """Whether a folder can be written to, and has room."""
    there = folder
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Check(what, "error", f"{folder} can't be made: {there} can't be written to", "choose another folder.")
    free = shutil.disk_usage(there).free
    detail = f"checkpoints take up to {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free: {folder.absolute()}"
    if free < needed:
        return Check(what, "error", detail, "free some space, or lower train.keep_checkpoints.")
    return Check(what, "ok", detail)


def _cache(trainer: Trainer) -> Check:
    config = trainer.config
    if not config.cache.use_cache:
        return Check("cache", "ok", "not used: samples are encoded whenever they train")
    place = _folder("cache", config.cache_dir, 0)
    if place.state == "error":
        return place
    try:
        require_complete(plan_samples(config, trainer.family, trainer.store), trainer.store, config)
    except CacheError as error:
        return Check("cache", "warning", error.headline, "run `qflux cache` before `qflux fit`.")
    except DataError:
        return Check("cache", "unknown", "the data have to be mended first")
    except QfluxError as error:
        return _not_known("cache", error, "run `qflux cache` before `qflux fit`.")
    return Check("cache", "ok", f"complete: {trainer.store.root}")


def _not_known(what: str, error: QfluxError, remedy: str) -> Check:
    """A hub that can't be reached now says nothing about a run; everything else that fails would fail then."""
    problem = error.headline
    return Check(what, "unknown", problem, remedy) if FETCH in problem else Check(what, "error", problem, error.remedy)


def _tried(what: str, action: Callable[[], object], detail: str) -> Check:
    try:
        action()
    except QfluxError as error:
        return Check(what, "error", error.problem, error.remedy)
    return Check(what, "ok", detail)
