"""Before a run spends time: everything that would otherwise fail hours later, tried once.

1. what the config names: optimizer, schedule, packages, layers
2. free disk for the checkpoints
3. the largest micro-batch of the plan: forward, backward, optimizer step
4. one held-out edit, in one step
5. a checkpoint, saved and read again

Nothing of it stays: gradients are zeroed and the learning rate is 0, so that no parameter moves, and the optimizer
forgets the step.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn

from qflux.adapters.lora import inject
from qflux.config import Config
from qflux.data.batch import EditBatch
from qflux.errors import CheckpointError, ConfigError, QfluxError
from qflux.losses.objective import Objective
from qflux.models import Family
from qflux.models.loading import empty_transformer
from qflux.models.precision import quantization_config
from qflux.runs.trackers import require_trackers
from qflux.training.checkpoint import Checkpoints, TrainingState
from qflux.training.distributed import World, local
from qflux.training.encode import TrainingSample
from qflux.training.model import TrainedModel, total_size
from qflux.training.optimizer.build import build_optimizer, build_schedule, set_rate
from qflux.training.optimizer.step import Update
from qflux.training.validation import DrawnEdits

logger = logging.getLogger(__name__)


def require_parts(config: Config, family: Family, total_steps: int) -> None:
    """What a config names and may not exist: optimizer, schedule, packages, layers.

    No weight is loaded, and nothing is written.
    """
    probe = [nn.Parameter(torch.zeros(1, 1))]
    build_schedule(config.train, build_optimizer(config.optimizer, probe), total_steps)
    require_trackers(config)
    if config.model.quantization:
        quantization_config(config.model.quantization, torch.bfloat16)
    if config.train.method == "lora":
        with torch.device("meta"):
            inject(empty_transformer(family.transformer, config.model), config.lora, config.seed)


def require_disk(config: Config, state: TrainingState) -> None:
    """An error if the checkpoints that will be kept do not fit on the disk."""
    parameters = total_size(list(state.update.parameters.values()))
    copies = 1 + 2 + (state.update.ema is not None)  # weights, two moments, the average
    kept = config.train.keep_checkpoints + 2  # the best one, and the one that is being written
    needed = kept * copies * parameters
    config.run_dir.mkdir(parents=True, exist_ok=True)
    there = sum(file.stat().st_size for file in (config.run_dir / "checkpoints").rglob("*") if file.is_file())
    free = shutil.disk_usage(config.run_dir).free
    if free + there < needed:
        raise QfluxError(
            f"checkpoints may take {needed / 1e6:,.0f} MB, and {config.run_dir} has {free / 1e6:,.0f} MB left",
            "free some space, lower train.keep_checkpoints, or choose another output_dir.",
        )


def rehearse(
    batch: EditBatch,
    samples: Sequence[TrainingSample],
    model: TrainedModel,
    objective: Objective,
    state: TrainingState,
    checkpoints: Checkpoints,
    world: World,
    config: Config,
) -> None:
    """A step that changes nothing on the batch that needs most memory, a checkpoint of it, and a step after that."""
    update = state.update
    with _forgotten(update.optimizer):
        with naming_memory(samples, batch, config):
            loss, _ = objective(model.velocity(batch), batch)
            update.backward(loss)
            _still_step(update, config)
            if update.ema is not None:
                update.ema.follow(0, torch.ones((), device=batch.targets.device))
            if batch.targets.is_cuda:
                torch.cuda.synchronize(batch.targets.device)
        _try_checkpoint(state, checkpoints, world)
        _still_step(update, config)


@contextmanager
def _forgotten(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Whatever happens to an optimizer inside is undone: it has not begun yet."""
    groups = [{key: deepcopy(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    try:
        yield
    finally:
        optimizer.zero_grad()
        optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)


def _still_step(update: Update, config: Config) -> None:
    """An optimizer step with gradients of zero and a rate of zero: all its memory, and no parameter moves."""
    torch._foreach_zero_([local(p.grad) for p in update.parameters.values() if p.grad is not None])
    for group in update.optimizer.param_groups:
        set_rate(group, 0.0)
    try:
        update.optimizer.step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ConfigError(
            f"optimizer.class_path: {config.optimizer.class_path} can't take a step: {_first_line(error)}",
            "choose another optimizer, or train.distributed: ddp.",
        ) from error
    if not all(bool(torch.isfinite(local(p)).all()) for p in update.parameters.values()):
        raise ConfigError(
            "optimizer.init_args: a step with gradients of zero makes parameters that are no numbers",
            "an eps above 0 helps, or train.preflight: false.",
        )


def try_edit(edits: DrawnEdits, model: TrainedModel) -> None:
    """One held-out edit in one step, with its decoding."""
    try:
        edits(model, steps=2, count=1)
    except torch.OutOfMemoryError as error:
        raise QfluxError(
            f"there is not enough memory for a validation image: {_first_line(error)}",
            "set validation.images: 0, or hold out smaller samples.",
        ) from error


def _try_checkpoint(state: TrainingState, checkpoints: Checkpoints, world: World) -> None:
    """Save and read a checkpoint, and compare."""
    folder = checkpoints.folder / ".preflight"
    world.first(lambda: shutil.rmtree(folder, ignore_errors=True))  # what a kill has left
    trial = Checkpoints(folder, 1, checkpoints.settings, world)
    before = {name: local(parameter).clone() for name, parameter in state.update.parameters.items()}
    try:
        trial.save(0, state)
        trial.resume(state)
        changed = [n for n, p in state.update.parameters.items() if not torch.equal(local(p), before[n])]
        if changed:
            raise CheckpointError(f"a checkpoint does not give back what was saved: {changed[0]} has changed")
    finally:
        if world.is_first:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def naming_memory(samples: Sequence[TrainingSample], batch: EditBatch, config: Config) -> Iterator[None]:
    """Running out of memory names the samples and what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        names = ", ".join(
            f"{sample.example.name} ({tokens} tokens)" for sample, tokens in zip(samples, batch.lengths, strict=True)
        )
        total, longest = sum(batch.lengths), max(batch.lengths)
        raise QfluxError(
            f"there is not enough memory for a micro-batch of {total} tokens: {names}. {_first_line(error)}",
            _remedy(config, total, longest),
        ) from error


def _remedy(config: Config, total: int, longest: int) -> str:
    ways = []
    if config.train.gradient_checkpointing is not True:
        ways.append("set train.gradient_checkpointing: true")
    if total > longest:
        ways.append(f"set data.max_tokens: {max(longest, total * 3 // 4)} instead of data.batch_size")
    else:
        ways.append("choose smaller areas in data.processor")
    if config.model.quantization is None and config.train.method == "lora":
        ways.append("quantize the base (model.quantization: fp8, int8 or nf4)")
    if config.train.method == "full":
        ways.append("share the model among GPUs (train.distributed: fsdp)")
    return ", or ".join(ways) + "."


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
