"""Checkpoints: folders that appear whole, hold no pickle, and say what they must contain.

    checkpoints/step-00000250/
        adapter.safetensors     trainable parameters
        optimizer.safetensors   optimizer state
        state.json              step, schedule, optimizer scalars, and the settings the run depends on
        manifest.json           size and hash of each file above

There is no random state to save: noise, timesteps and order follow from the seed (see `losses.timesteps`, `data.plan`).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qflux.data.plan import TrainingPlan
from qflux.data.store import file_hash, sync_folder, write_json, write_tensors
from qflux.errors import CheckpointError

logger = logging.getLogger(__name__)


FILES = {"adapter.safetensors", "optimizer.safetensors", "state.json"}


@dataclass(frozen=True)
class TrainingState:
    """What moves during training: parameters by name, their optimizer, the schedule, the plan's known epochs."""

    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    plan: TrainingPlan


class Checkpoints:
    """The checkpoints of one run, under `folder`.

    `settings` is what a continued run must share with the one it continues. `keep` of the newest stay.
    """

    def __init__(self, folder: Path, keep: int, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.settings = settings or {}
        self._keep = keep

    def epoch_starts(self, identity: Mapping[str, Any]) -> list[int] | None:
        """The plan's known epochs, from the newest checkpoint of a run with this data."""
        for folder in reversed(self._all()):
            try:
                saved = json.loads((folder / "state.json").read_text())
                if all(saved["settings"].get(key) == value for key, value in _plain(dict(identity)).items()):
                    return [int(start) for start in saved["epoch_starts"]]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return None

    def save(self, step: int, state: TrainingState) -> Path:
        """Write the state after `step` optimizer steps."""
        final = self.folder / f"step-{step:08d}"
        if final.is_dir():
            if _fault(final) is None:
                return final
            shutil.rmtree(final)
        staging = self.folder / f".{final.name}.{os.getpid()}.tmp"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            self._write(staging, step, state)
            staging.rename(final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        sync_folder(self.folder)
        self._rotate(final)
        return final

    def _write(self, staging: Path, step: int, state: TrainingState) -> None:
        staging.mkdir(parents=True)
        tensors, scalars = _flatten_optimizer(state.optimizer.state_dict())
        write_tensors(staging / "adapter.safetensors", dict(state.parameters))
        write_tensors(staging / "optimizer.safetensors", tensors)
        write_json(
            staging / "state.json",
            {
                "step": step,
                "optimizer": scalars,
                "schedule": _plain(state.schedule.state_dict()),
                "epoch_starts": state.plan.starts,
                "settings": _plain(dict(self.settings)),
            },
        )
        files = {file.name: [file.stat().st_size, file_hash(file)] for file in sorted(staging.iterdir())}
        write_json(staging / "manifest.json", files)

    def resume(self, state: TrainingState) -> int:
        """Load the newest complete checkpoint into `state`; the number of steps done, 0 if there is none."""
        for folder in reversed(self._all()):
            fault = _fault(folder)
            if fault:
                logger.warning("checkpoint %s is skipped: %s", folder, fault)
                continue
            return self._load(folder, state)
        return 0

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("step-" + "[0-9]" * 8))

    def _load(self, folder: Path, state: TrainingState) -> int:
        saved = json.loads((folder / "state.json").read_text())
        settings, before = json.loads(json.dumps(self.settings)), saved["settings"]
        changed = sorted(key for key in settings.keys() | before.keys() if settings.get(key) != before.get(key))
        if changed:
            details = "; ".join(f"{key} was {before.get(key)!r}, is {settings.get(key)!r}" for key in changed)
            raise CheckpointError(
                f"{folder} belongs to another configuration: {details}", "restore it, or choose another run_name."
            )
        weights = load_file(folder / "adapter.safetensors")
        if weights.keys() != state.parameters.keys():
            odd = sorted(weights.keys() ^ state.parameters.keys())[0]
            raise CheckpointError(f"{folder} does not fit the model: {odd} is in one of them only")
        with torch.no_grad():
            for name, parameter in state.parameters.items():
                parameter.copy_(weights[name])
        tensors = load_file(folder / "optimizer.safetensors")
        state.optimizer.load_state_dict(_restore_optimizer(tensors, saved["optimizer"]))
        state.schedule.load_state_dict(saved["schedule"])
        return int(saved["step"])

    def _rotate(self, newest: Path) -> None:
        """Remove older checkpoints than the last `keep`. Damaged later ones must not push out what was just saved."""
        older = [folder for folder in self._all() if folder.name < newest.name]
        for old in older[: max(0, len(older) - self._keep + 1)]:
            shutil.rmtree(old, ignore_errors=True)
        for torn in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(torn, ignore_errors=True)


def _fault(folder: Path) -> str | None:
    """Why a checkpoint can't be used, if so."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if not isinstance(manifest, dict) or manifest.keys() != FILES:
            return "its manifest does not list the files of a checkpoint"
        for name, (size, digest) in manifest.items():
            file = folder / name
            if file.stat().st_size != size or file_hash(file) != digest:
                return f"{name} is not what the manifest says"
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return None


def _flatten_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state as named tensors and plain values."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                scalars[f"{index}.{name}"] = value
    return tensors, {"values": scalars, "param_groups": _plain(state["param_groups"])}


def _restore_optimizer(tensors: dict[str, Tensor], scalars: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *scalars["values"].items()]:
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
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
