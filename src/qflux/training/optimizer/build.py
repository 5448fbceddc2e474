"""Optimizers by class path, and learning-rate schedules counted in optimizer steps."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import Tensor, nn

from qflux.config import OptimizerSettings, TrainSettings
from qflux.errors import ConfigError


def build_optimizer(settings: OptimizerSettings, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """An instance of `settings.class_path`; a class or an argument that does not exist is a `ConfigError`."""
    module_name, _, class_name = settings.class_path.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.class_path: {settings.class_path} can't be imported: {error}",
            "install the package it comes from, or use torch.optim.AdamW.",
        ) from None
    if not (inspect.isclass(optimizer_class) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.class_path: {settings.class_path} is not a torch optimizer")
    if optimizer_class is torch.optim.LBFGS:
        raise ConfigError("optimizer.class_path: LBFGS evaluates the loss several times a step, which is not supported")
    odd = [key for key, value in settings.init_args.items() if isinstance(value, float) and not math.isfinite(value)]
    if odd:
        raise ConfigError(f"optimizer.init_args.{odd[0]}: {settings.init_args[odd[0]]} is no number to train with")
    known = inspect.signature(optimizer_class).parameters
    arguments = dict(settings.init_args)
    if "fused" in known and "foreach" not in arguments and all(p.is_cuda for p in parameters):
        arguments.setdefault("fused", True)
    try:
        return optimizer_class(list(parameters), **arguments)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer.init_args: {error}", f"{class_name} takes {', '.join(list(known)[1:])}."
        ) from None


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step, as a function of its number alone: there is nothing to save or to resume."""

    factor: Callable[[int], float]
    """Of the configured rate, at a step counted from 0."""

    def set(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        for group in optimizer.param_groups:
            set_rate(group, float(group["initial_lr"]) * self.factor(number))


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Some optimizers keep it in a tensor, and want it to stay there."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def build_schedule(settings: TrainSettings, optimizer: torch.optim.Optimizer, total_steps: int) -> Schedule:
    """diffusers' schedule of that name, over `total_steps` optimizer steps."""
    try:
        scheduler = get_scheduler(
            settings.lr_scheduler,
            optimizer,
            step_rules=settings.lr_step_rules,
            num_warmup_steps=settings.lr_warmup_steps,
            num_training_steps=total_steps,
            num_cycles=settings.lr_num_cycles,
            power=settings.lr_power,
        )
        (factor, *_) = scheduler.lr_lambdas
        factors = [factor(number) for number in range(0, total_steps, max(1, total_steps // 1000))]
        if not all(math.isfinite(value) and value >= 0 for value in factors):
            raise ValueError("its rates are no numbers, or below 0")
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"train.lr_scheduler: {settings.lr_scheduler} can't be made: {error}") from None
    return Schedule(factor)
