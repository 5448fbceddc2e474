"""Everything that would otherwise fail hours later, tried once before the first step.

1. free disk for the checkpoints
2. the largest micro-batch of the plan: forward, backward, optimizer step
3. a checkpoint, saved and read again
4. one held-out edit, in two steps

Nothing of it stays: gradients are zeroed and the learning rate is 0, so that no parameter moves, and the optimizer
forgets the step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch

from qflux.capacity.shortage import Shortage, first_line
from qflux.config import Config
from qflux.data.batch import Batch
from qflux.errors import CheckpointError, ConfigError, QfluxError
from qflux.losses.objective import Objective
from qflux.runs.paths import RunPaths
from qflux.training.checkpoint import Checkpoints, TrainingState
from qflux.training.distributed import World, local
from qflux.training.edits import DrawnEdits
from qflux.training.model import TrainedModel
from qflux.training.optimizer.schedule import set_rate
from qflux.training.optimizer.step import Update
from qflux.training.passes import loss_of
from qflux.training.preflight.probes import checkpoint_bytes, require_room


class Rehearsal:
    """A step that changes nothing, with everything around it."""

    def __init__(self, config: Config, model: TrainedModel, state: TrainingState, world: World) -> None:
        self._config = config
        self._model = model
        self._state = state
        self._world = world

    def require_disk(self) -> None:
        """An error if the checkpoints that will be kept do not fit on the disk."""
        weights = sum(parameter.numel() for parameter in self._state.update.parameters.values())
        paths = RunPaths(self._config.run_dir)
        paths.root.mkdir(parents=True, exist_ok=True)
        there = sum(file.stat().st_size for file in paths.checkpoints.rglob("*") if file.is_file())
        require_room(paths.root, checkpoint_bytes(self._config, weights), there)

    def step(self, batch: Batch, objective: Objective, checkpoints: Checkpoints) -> Shortage | None:
        """A step on the batch that needs most memory, a checkpoint of it, and a step after that.

        If there is not enough memory for it on some rank, that is said on all of them, and nothing has happened.
        """
        update = self._state.update
        with _forgotten(update.optimizer):
            shortage = self._try_step(batch, objective)
            if self._world.any(shortage is not None):
                return shortage or Shortage.of(batch)
            self._try_checkpoint(checkpoints)
            _still_step(update, self._config)
        return None

    def _try_step(self, batch: Batch, objective: Objective) -> Shortage | None:
        update = self._state.update
        try:
            loss, _ = loss_of(batch, self._model, objective)
            update.backward(loss)
            _still_step(update, self._config)
            if update.ema is not None:
                update.ema.follow(0, torch.ones((), device=batch.targets.device))
            if batch.targets.is_cuda:
                torch.cuda.synchronize(batch.targets.device)
        except torch.OutOfMemoryError as error:
            return Shortage.of(batch, error)
        return None

    def edit(self, edits: DrawnEdits) -> None:
        """One held-out edit in two steps, with its decoding."""
        try:
            edits(self._model, steps=2, count=1)
        except torch.OutOfMemoryError as error:
            raise QfluxError(
                f"there is not enough memory for a validation image: {first_line(error)}",
                "set validation.images: 0, or hold out smaller samples.",
            ) from error

    def _try_checkpoint(self, checkpoints: Checkpoints) -> None:
        """Save and read a checkpoint, and compare."""
        state, world = self._state, self._world
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
def _forgotten(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo whatever happens to an optimizer inside the block: it has not begun yet."""
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
            f"optimizer.class_path: {config.optimizer.class_path} can't take a step: {first_line(error)}",
            "choose another optimizer, or train.distributed: ddp.",
        ) from error
    if not all(bool(torch.isfinite(local(p)).all()) for p in update.parameters.values()):
        raise ConfigError(
            "optimizer.init_args: a step with gradients of zero makes parameters that are NaN",
            "an eps above 0 helps, or train.preflight: false.",
        )
