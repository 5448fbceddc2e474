"""Checkpoints: folders that appear complete or not at all, hold no pickle, and say what they must contain.

    checkpoints/step-00000250/
        parameters.safetensors  what trains
        optimizer.safetensors   optimizer state
        ema.safetensors         the running average, if there is one
        state.json              step, optimizer scalars, held-out loss, and the settings the run depends on
        manifest.json           size and hash of each file above

There is no random state to save: noise, timesteps and order follow from the seed (see `losses.timesteps`, `data.plan`);
the learning rate follows from the step. Tensors are full, however they were sharded among processes: a run may go on
with another number of them. Only the first process reads and writes.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qflux.data.plan import TrainingPlan
from qflux.errors import CheckpointError
from qflux.files.atomic import new_folder, restore_folder, write_json, write_tensors
from qflux.files.hashing import file_hash
from qflux.training.distributed import World, copy_, full_tensor
from qflux.training.optimizer.build import ordered
from qflux.training.optimizer.state import flatten_optimizer, plain, restore_optimizer
from qflux.training.optimizer.step import Update
from qflux.training.resume_guard import Past

logger = logging.getLogger(__name__)


FILES = {"parameters.safetensors", "optimizer.safetensors", "state.json"}
EMA_FILE = "ema.safetensors"


@dataclass(frozen=True)
class TrainingState:
    """What moves during training: parameters, optimizer, average, loss scale; and the plan's known epochs."""

    update: Update
    plan: TrainingPlan


@dataclass(frozen=True)
class _Snapshot:
    """A state on the host, in full tensors; on other ranks than the first they are missing."""

    files: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def read_past(folder: Path, world: World) -> Past | None:
    """Settings, epochs and length of the run so far, from the newest complete checkpoint."""
    found = world.share(_newest_state(folder) if world.is_first else None)
    return Past(found["settings"], found["epoch_starts"], found["step"]) if found else None


def _newest_state(folder: Path) -> dict[str, Any] | None:
    for checkpoint in reversed(_all(folder)):
        try:
            if _fault(checkpoint) is None:
                saved = json.loads((checkpoint / "state.json").read_text())
                return {
                    "settings": dict(saved["settings"]),
                    "epoch_starts": [int(start) for start in saved["epoch_starts"]],
                    "step": int(saved["step"]),
                }
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def adopt(source: Path, folder: Path) -> None:
    """Let a run begin with a checkpoint of another one, unless it has some of its own."""
    if _all(folder):
        logger.info("train.resume_from was the start of this run, which goes on from its own checkpoint")
        return
    fault = _fault(source) if source.is_dir() else "there is no such folder"
    if fault is not None or source not in _all(source.parent):
        there = ", ".join(path.name for path in _all(source.parent)) if source.parent.is_dir() else ""
        raise CheckpointError(
            f"train.resume_from: {source} is no checkpoint: {fault or 'it is not called step-'}",
            f"these are there: {there}." if there else "give a folder such as runs/name/checkpoints/step-00000250.",
        )
    with new_folder(folder / source.name) as staging:
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, staging / file.name)
    logger.info("goes on from %s", source)


class Checkpoints:
    """The checkpoints of one run, under `folder`."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        settings: Mapping[str, Any] | None = None,
        world: World | None = None,
        may_differ: Collection[str] = (),
        measure: str = "",
    ) -> None:
        """
        Args:
            keep: so many of the newest stay, and the best.
            settings: what a continued run must share with the one it continues.
            may_differ: of these, what is no reason to refuse: it is compared, and spoken of, elsewhere.
            measure: how held-out losses are measured; those of another measure can't be compared.
        """
        self.folder = folder
        self.settings = settings or {}
        self._may_differ = frozenset(may_differ)
        self._measure = measure
        self._keep = keep
        self._world = world or World()

    def newest_step(self) -> int:
        """About where a resumed run will go on, from names alone."""
        newest = _all(self.folder)[-1:]
        return self._world.share(int(newest[0].name.removeprefix("step-")) if newest else 0)

    def save(self, step: int, state: TrainingState, held_out: float | None = None) -> Path:
        """Write the state after `step` optimizer steps; all ranks must call.

        One that is there already stays, unless this one knows its held-out loss and that one does not.
        """
        final = self._place(step)
        knows_more = held_out is not None and self.held_out(step) is None
        if self._world.share(final.is_dir() and _fault(final) is None and not knows_more):
            return final
        snapshot = self._snapshot(step, state, held_out)
        self._world.first(lambda: self._write(final, snapshot))
        return final

    def _snapshot(self, step: int, state: TrainingState, held_out: float | None) -> _Snapshot:
        update = state.update
        tensors, scalars = flatten_optimizer(update.optimizer, ordered(update.optimizer))
        files: dict[str, Mapping[str, Tensor]] = {
            "parameters.safetensors": update.parameters,
            "optimizer.safetensors": tensors,
        }
        if update.ema is not None:
            files[EMA_FILE] = update.ema.average
        scale = update.loss_scale
        return _Snapshot(
            {name: self._gathered(content) for name, content in files.items()},
            {
                "step": step,
                "optimizer": scalars,
                "loss_scale": None if scale is None else {key: float(t) for key, t in scale.tensors().items()},
                "held_out": held_out,
                "held_out_measure": self._measure,
                "epoch_starts": state.plan.starts,
                "settings": plain(dict(self.settings)),
            },
        )

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put together one by one; only the first rank keeps them."""
        kept = {}
        for name, tensor in tensors.items():
            together = full_tensor(tensor)
            if self._world.is_first:
                kept[name] = together.cpu()
        return kept

    def _write(self, final: Path, snapshot: _Snapshot) -> None:
        with new_folder(final) as staging:
            for name, tensors in snapshot.files.items():
                write_tensors(staging / name, tensors)
            write_json(staging / "state.json", snapshot.state)
            files = {file.name: [file.stat().st_size, file_hash(file)] for file in sorted(staging.iterdir())}
            write_json(staging / "manifest.json", files)
        self._rotate(final)

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def require_usable(self, total: int) -> None:
        """An error now, before anything is loaded, if the newest checkpoint can't be continued."""
        newest = self._newest_complete()
        if newest is None:
            return
        saved = json.loads((newest / "state.json").read_text())
        self._require_same_settings(newest, saved["settings"])
        if int(saved["step"]) > total:
            raise CheckpointError(
                f"{self.folder.parent} has already trained {saved['step']} steps, more than the {total} asked for",
                "raise train.max_train_steps, or choose another run_name.",
            )

    def resume(self, state: TrainingState) -> int:
        """Load the newest complete checkpoint into `state`; the number of steps done, 0 if there is none."""
        newest = self._world.first(self._newest_complete)
        return self._load(newest, state)

    def _newest_complete(self) -> Path | None:
        for aside in self.folder.glob(".step-*.old"):  # killed while it was being replaced
            restore_folder(self.folder / aside.name.removeprefix(".").removesuffix(".old"))
        faults = []
        for folder in reversed(_all(self.folder)):
            fault = _fault(folder)
            if fault is None:
                return folder
            faults.append(f"{folder.name}: {fault}")
            logger.warning("checkpoint %s is skipped: %s", folder, fault)
        if faults:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is complete: {'; '.join(faults)}",
                "restore one from a backup, or remove the folder to begin anew.",
            )
        return None

    def best(self) -> tuple[Path, float] | None:
        """The complete checkpoint of the lowest held-out loss, the earliest of equals."""
        losses = [(loss, folder) for folder in _all(self.folder) if (loss := self._loss_of(folder)) is not None]
        for loss, folder in sorted(losses):
            if _fault(folder) is None:
                return folder, loss
        return None

    def held_out(self, step: int) -> float | None:
        """The held-out loss of a checkpoint, if it is known."""
        return self._loss_of(self._place(step))

    def _loss_of(self, folder: Path) -> float | None:
        try:
            saved = json.loads((folder / "state.json").read_text())
            loss = saved["held_out"]
            comparable = saved.get("held_out_measure", "") == self._measure
            return float(loss) if loss is not None and comparable and math.isfinite(float(loss)) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _load(self, folder: Path | None, state: TrainingState) -> int:
        saved = self._world.share(None if folder is None else json.loads((folder / "state.json").read_text()))
        if saved is None:
            return 0
        self._require_same_settings(folder, saved["settings"])
        update = state.update
        missing = set(update.parameters)
        with torch.no_grad():
            for name, tensor in self._tensors(folder, "parameters.safetensors"):
                if name not in update.parameters:
                    raise CheckpointError(f"{folder} does not fit the model: it has {name}, which the model has not")
                copy_(update.parameters[name], tensor)
                missing.discard(name)
            if missing:
                raise CheckpointError(f"{folder} does not fit the model: it lacks {sorted(missing)[0]}")
            if update.ema is not None:
                for name, tensor in self._tensors(folder, EMA_FILE):
                    copy_(update.ema.average[name], tensor)
            for name, tensor in update.loss_scale.tensors().items() if update.loss_scale else ():
                tensor.fill_(saved["loss_scale"][name])
        restore_optimizer(
            update.optimizer,
            ordered(update.optimizer),
            self._tensors(folder, "optimizer.safetensors"),
            saved["optimizer"],
        )
        return int(saved["step"])

    def _tensors(self, folder: Path | None, name: str) -> Iterator[tuple[str, Tensor]]:
        """One after another, read by the first rank, on all ranks: never all of a file in memory."""
        if folder is None:
            yield from self._world.scatter(None)
            return
        with safe_open(folder / name, framework="pt") as file:
            yield from self._world.scatter(dict.fromkeys(file.keys(), file.get_tensor))

    def _require_same_settings(self, folder: Path | None, before: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(self.settings))
        known = (settings.keys() | before.keys()) - self._may_differ
        changed = sorted(key for key in known if settings.get(key) != before.get(key))
        if changed:
            details = "; ".join(f"{key} was {before.get(key)!r}, is {settings.get(key)!r}" for key in changed)
            raise CheckpointError(
                f"{folder or self.folder} belongs to another configuration: {details}",
                "restore it, or choose another run_name.",
            )

    def _rotate(self, newest: Path) -> None:
        """Remove older checkpoints than the last `keep`, except the best.

        Damaged later ones must not push out what was just saved.
        """
        best = self.best()
        older = [folder for folder in _all(self.folder) if folder.name < newest.name]
        for old in older[: max(0, len(older) - self._keep + 1)]:
            if best is None or old != best[0]:
                shutil.rmtree(old, ignore_errors=True)
        for torn in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(torn, ignore_errors=True)


def _fault(folder: Path) -> str | None:
    """Why a checkpoint can't be used, if so."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if not isinstance(manifest, dict) or manifest.keys() - {EMA_FILE} != FILES:
            return "its manifest does not list the files of a checkpoint"
        for name, (size, digest) in manifest.items():
            file = folder / name
            if file.stat().st_size != size or file_hash(file) != digest:
                return f"{name} is not what the manifest says"
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return None
