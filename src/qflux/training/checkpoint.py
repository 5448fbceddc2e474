"""Checkpoints: folders that appear whole, hold no pickle, and say what they must contain.

    checkpoints/step-00000250/
        parameters.safetensors  what trains
        optimizer.safetensors   optimizer state
        ema.safetensors         the running average, if there is one
        state.json              step, optimizer scalars, held-out loss, and the settings the run depends on
        manifest.json           size and hash of each file above

There is no random state to save: noise, timesteps and order follow from the seed (see `losses.timesteps`, `data.plan`);
the learning rate follows from the step. Tensors are whole, however they were shared out among processes: a run may go
on with another number of them. Only the first process reads and writes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qflux.data.plan import TrainingPlan
from qflux.data.store import file_hash, sync_folder, write_json, write_tensors
from qflux.errors import CheckpointError
from qflux.training.distributed import World, copy_, like, whole
from qflux.training.update import Update

logger = logging.getLogger(__name__)


FILES = {"parameters.safetensors", "optimizer.safetensors", "state.json"}
EMA_FILE = "ema.safetensors"
SEPARATOR = "/"


@dataclass(frozen=True)
class TrainingState:
    """What moves during training: parameters, optimizer, average, loss scale; and the plan's known epochs."""

    update: Update
    plan: TrainingPlan


@dataclass(frozen=True)
class _Snapshot:
    """A state on the host, whole; on other ranks than the first the tensors are missing."""

    files: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, under `folder`.

    `settings` is what a continued run must share with the one it continues. `keep` of the newest stay, and the best.
    """

    def __init__(
        self, folder: Path, keep: int, settings: Mapping[str, Any] | None = None, world: World | None = None
    ) -> None:
        self.folder = folder
        self.settings = settings or {}
        self._keep = keep
        self._world = world or World()

    def epoch_starts(self, identity: Mapping[str, Any]) -> list[int] | None:
        """The plan's known epochs, from the newest checkpoint of a run with this data."""
        return self._world.share(self._known_starts(identity) if self._world.is_first else None)

    def _known_starts(self, identity: Mapping[str, Any]) -> list[int] | None:
        for folder in reversed(self._all()):
            try:
                saved = json.loads((folder / "state.json").read_text())
                if all(saved["settings"].get(key) == value for key, value in _plain(dict(identity)).items()):
                    return [int(start) for start in saved["epoch_starts"]]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return None

    def newest_step(self) -> int:
        """About where a resumed run will go on, from names alone."""
        newest = self._all()[-1:]
        return self._world.share(int(newest[0].name.removeprefix("step-")) if newest else 0)

    def save(self, step: int, state: TrainingState, held_out: float | None = None) -> Path:
        """Write the state after `step` optimizer steps; all ranks must call."""
        final = self.folder / f"step-{step:08d}"
        if self._world.share(final.is_dir() and _fault(final) is None):
            return final
        snapshot = self._snapshot(step, state, held_out)
        self._world.first(lambda: self._write(final, snapshot))
        return final

    def _snapshot(self, step: int, state: TrainingState, held_out: float | None) -> _Snapshot:
        update = state.update
        tensors, scalars = _flatten_optimizer(update.optimizer.state_dict())
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
                "epoch_starts": state.plan.starts,
                "settings": _plain(dict(self.settings)),
            },
        )

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put together one by one; only the first rank keeps them."""
        kept = {}
        for name, tensor in tensors.items():
            together = whole(tensor)
            if self._world.is_first:
                kept[name] = together.cpu()
        return kept

    def _write(self, final: Path, snapshot: _Snapshot) -> None:
        shutil.rmtree(final, ignore_errors=True)
        staging = self.folder / f".{final.name}.{os.getpid()}.tmp"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            for name, tensors in snapshot.files.items():
                write_tensors(staging / name, tensors)
            write_json(staging / "state.json", snapshot.state)
            files = {file.name: [file.stat().st_size, file_hash(file)] for file in sorted(staging.iterdir())}
            write_json(staging / "manifest.json", files)
            staging.rename(final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        sync_folder(self.folder)
        self._rotate(final)

    def resume(self, state: TrainingState) -> int:
        """Load the newest complete checkpoint into `state`; the number of steps done, 0 if there is none."""
        newest = self._world.first(self._newest_complete)
        return self._load(newest, state)

    def _newest_complete(self) -> Path | None:
        faults = []
        for folder in reversed(self._all()):
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
        losses = [(loss, folder) for folder in self._all() if (loss := _held_out(folder)) is not None]
        for loss, folder in sorted(losses):
            if _fault(folder) is None:
                return folder, loss
        return None

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step-" + "[0-9]" * 8))

    def _load(self, folder: Path | None, state: TrainingState) -> int:
        saved = self._world.share(None if folder is None else json.loads((folder / "state.json").read_text()))
        if saved is None:
            return 0
        self._require_same_settings(folder, saved["settings"])
        update = state.update
        weights = self._tensors(folder, "parameters.safetensors")
        if weights.keys() != update.parameters.keys():
            odd = sorted(weights.keys() ^ update.parameters.keys())[0]
            raise CheckpointError(f"{folder} does not fit the model: {odd} is in one of them only")
        with torch.no_grad():
            for name, parameter in update.parameters.items():
                copy_(parameter, weights[name])
            if update.ema is not None:
                update.ema.load(self._tensors(folder, EMA_FILE))
            for name, tensor in update.loss_scale.tensors().items() if update.loss_scale else ():
                tensor.fill_(saved["loss_scale"][name])
        tensors = self._tensors(folder, "optimizer.safetensors")
        update.optimizer.load_state_dict(
            _restore_optimizer(tensors, saved["optimizer"], list(update.parameters.values()))
        )
        return int(saved["step"])

    def _tensors(self, folder: Path | None, name: str) -> dict[str, Tensor]:
        """Read by the first rank, on all ranks."""
        return self._world.scatter(None if folder is None else load_file(folder / name))

    def _require_same_settings(self, folder: Path | None, before: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(self.settings))
        changed = sorted(key for key in settings.keys() | before.keys() if settings.get(key) != before.get(key))
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
        older = [folder for folder in self._all() if folder.name < newest.name]
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


def _held_out(folder: Path) -> float | None:
    try:
        loss = json.loads((folder / "state.json").read_text())["held_out"]
        return None if loss is None else float(loss)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _flatten_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state as named tensors and plain values; a name is the path to its value."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for path, value in _leaves(state["state"]):
        name = SEPARATOR.join(path)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif _is_plain(value):
            scalars[name] = value
        else:
            raise CheckpointError(
                f"the optimizer keeps a {type(value).__name__} ({name}), which can't be saved without pickle",
                "choose another optimizer.",
            )
    return tensors, {"values": scalars, "param_groups": _plain(state["param_groups"])}


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, (*path, str(key)))


def _restore_optimizer(tensors: dict[str, Tensor], scalars: dict[str, Any], parameters: list[Any]) -> dict[str, Any]:
    """The inverse; what has the shape of its parameter is shared out as that is."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *scalars["values"].items()]:
        index, *path, name = key.split(SEPARATOR)
        parameter = parameters[int(index)]
        place = state.setdefault(int(index), {})
        for part in path:
            place = place.setdefault(part, {})
        same = isinstance(value, Tensor) and value.shape == parameter.shape
        place[name] = like(value, parameter) if same else value
    return {"state": state, "param_groups": scalars["param_groups"]}


def _plain(value: Any) -> Any:
    """Values as JSON has them; anything else would need pickle, and is left for the constructor to set again."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if _is_plain(item)}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | dict)
