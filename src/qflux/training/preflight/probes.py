"""What can be known about a run before any weight is loaded. `check` tells all of it, `fit` stops at the first fault.

A probe raises a `QfluxError`, or says what it has found.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from qflux.adapters.files import read_adapter
from qflux.adapters.lora import inject, trainable
from qflux.config import Config
from qflux.data.images.decode import ImageFile, read_facts
from qflux.errors import QfluxError
from qflux.losses.objective import build_loss
from qflux.models.family import Family
from qflux.models.loading import empty_transformer
from qflux.models.precision import quantization_config
from qflux.runs.trackers import require_trackers
from qflux.training.optimizer.build import build_optimizer
from qflux.training.optimizer.schedule import build_schedule

Probe = Callable[[], str]


def settings_probes(config: Config, family: Family, total_steps: int, goes_on: bool) -> Iterator[tuple[str, Probe]]:
    """What a config names and may not exist: optimizer, schedule, loss, packages, images, a LoRA to start from.

    A run that goes on from a checkpoint does not need that LoRA any more.
    """
    yield "optimizer", partial(_optimizer, config, total_steps)
    if config.loss.class_path:
        yield "loss", partial(_loss, config)
    if config.train.trackers:
        yield "trackers", partial(_trackers, config)
    if config.model.quantization:
        yield "quantization", partial(_quantization, config.model.quantization)
    for edit in config.validation.edits:
        for path in edit.images:
            yield "edits", partial(_image, path)
    if starts_from(config) and not goes_on:
        yield "start", partial(_start, config, family)


def starts_from(config: Config) -> Path | None:
    """The adapter that a run is to begin with, if there is one."""
    return config.lora.init_from if config.train.method == "lora" else None


def trained_weights(config: Config, family: Family) -> int:
    """How many weights train, from the transformer's description alone; layers that do not exist are an error."""
    with torch.device("meta"):
        transformer = empty_transformer(family.transformer, config.model)
        if config.train.method == "full":
            return sum(parameter.numel() for parameter in transformer.parameters())
        inject(transformer, config.lora, config.lora_targets, config.seed)
    return sum(parameter.numel() for parameter in trainable(transformer).values())


def checkpoint_bytes(config: Config, weights: int) -> int:
    """What the checkpoints of a run may take: weights, two moments and perhaps the average, in float32.

    Besides those that are kept there is the best one, and the one that is being written.
    """
    copies = 1 + 2 + (config.train.ema is not None)
    return 4 * weights * copies * (config.train.keep_checkpoints + 2)


def require_room(folder: Path, needed: int, already_there: int = 0) -> str:
    """An error unless a folder can be made and has room for so many bytes, beside those it may replace."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise QfluxError(f"{folder} can't be made: {there} can't be written to", "choose another folder.")
    free = shutil.disk_usage(there).free
    if free + already_there < needed:
        raise QfluxError(
            f"checkpoints may take {needed / 1e6:,.0f} MB, and {folder} has {free / 1e6:,.0f} MB left",
            "free some space, lower train.keep_checkpoints, or choose another output_dir.",
        )
    return f"checkpoints take up to {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free: {folder.absolute()}"


def _optimizer(config: Config, total_steps: int) -> str:
    probe = {f"layer.lora_{part}.default": nn.Parameter(torch.zeros(1, 1)) for part in "AB"}
    optimizer = build_optimizer(config.optimizer, probe, config.lora.plus_ratio)
    build_schedule(config.train, optimizer, max(1, total_steps))
    return f"{config.optimizer.class_path}, {config.train.lr_scheduler}"


def _loss(config: Config) -> str:
    build_loss(config.loss)
    return str(config.loss.class_path)


def _trackers(config: Config) -> str:
    require_trackers(config)
    return ", ".join(config.train.trackers)


def _quantization(kind: str) -> str:
    quantization_config(kind, torch.bfloat16)
    return kind


def _image(path: Path) -> str:
    read_facts(ImageFile(path))
    return f"validation.edits: {path}"


def _start(config: Config, family: Family) -> str:
    start = starts_from(config)
    assert start is not None
    read_adapter(start).require_family(family)
    return f"lora.init_from: {start}"
