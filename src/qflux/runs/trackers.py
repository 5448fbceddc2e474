"""TensorBoard, Weights & Biases, SwanLab. Keys come from the environment; they are never written anywhere."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from qflux.config import Config
from qflux.errors import ConfigError
from qflux.files.hashing import key_of


class Tracker(Protocol):
    """Where else metrics go."""

    def log(self, step: int, numbers: dict[str, float]) -> None: ...

    def image(self, step: int, name: str, file: Path) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, config: Config, steps_done: int) -> None:
        writer = _need("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = writer(str(config.run_dir / "tensorboard"), purge_step=steps_done + 1)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, file: Path) -> None:
        with Image.open(file) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Mode and key come from WANDB_MODE and WANDB_API_KEY; a resumed run continues its curves."""

    def __init__(self, config: Config, steps_done: int) -> None:
        self._module = _need("wandb", "wandb")
        self._run: Any = self._module.init(
            project=os.environ.get("WANDB_PROJECT", "qflux"),
            name=config.run_name,
            id=_run_id(config),
            resume="allow",
            dir=str(config.run_dir),
            config=config.dump(),
        )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def image(self, step: int, name: str, file: Path) -> None:
        self._run.log({name: self._module.Image(str(file))}, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """Mode and key come from SWANLAB_MODE and SWANLAB_API_KEY."""

    def __init__(self, config: Config, steps_done: int) -> None:
        self._module = _need("swanlab", "swanlab")
        mode = os.environ.get("SWANLAB_MODE")
        online = {} if mode in ("local", "offline", "disabled") else {"id": _run_id(config), "resume": "allow"}
        self._module.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", "qflux"),
            experiment_name=config.run_name,
            logdir=str(config.run_dir / "swanlab"),
            config=config.dump(),
            **({"mode": mode} if mode else {}),
            **online,
        )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._module.log(numbers, step=step)

    def image(self, step: int, name: str, file: Path) -> None:
        self._module.log({name: self._module.Image(str(file))}, step=step)

    def close(self) -> None:
        self._module.finish()


_KINDS: dict[str, type[TensorBoard] | type[WeightsAndBiases] | type[SwanLab]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "swanlab": SwanLab,
}


def open_trackers(config: Config, steps_done: int) -> Sequence[Tracker]:
    """The trackers that a config asks for; a resumed run says how many steps are drawn already."""
    return [_open(name, config, steps_done) for name in dict.fromkeys(config.train.trackers)]


def _open(name: str, config: Config, steps_done: int) -> Tracker:
    try:
        return _KINDS[name](config, steps_done)
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"train.trackers: {name} can't be started: {reason}",
            "log in to it, set its mode to offline in the environment, or leave it out.",
        ) from error


def require_trackers(config: Config) -> None:
    """An error if one of them is not installed."""
    for name in config.train.trackers:
        _need("torch.utils.tensorboard" if name == "tensorboard" else name, name)


def _run_id(config: Config) -> str:
    """The same for every start of a run."""
    return key_of("run", str(config.run_dir.resolve()))[:16]


def _need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"train.trackers: {extra} is not installed ({error})", f"pip install 'qflux[{extra}]'"
        ) from None
