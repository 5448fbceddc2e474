"""Optimizers by class path, and learning-rate schedules counted in optimizer steps."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable

import torch
from diffusers.optimization import get_scheduler
from torch import nn

from qflux.config import OptimizerSettings, TrainSettings
from qflux.errors import ConfigError


def build_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An instance of `settings.class_path`; a class or an argument that does not exist is a `ConfigError`."""
    module_name, _, class_name = settings.class_path.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"optimizer.class_path: {settings.class_path} can't be imported: {error}",
            "install the package it comes from, or use torch.optim.AdamW.",
        ) from None
    if not (inspect.isclass(optimizer_class) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.class_path: {settings.class_path} is not a torch optimizer")
    if optimizer_class is torch.optim.LBFGS:
        raise ConfigError("optimizer.class_path: LBFGS evaluates the loss several times a step, which is not supported")
    try:
        return optimizer_class(list(parameters), **settings.init_args)
    except (TypeError, ValueError, IndexError) as error:
        accepted = ", ".join(list(inspect.signature(optimizer_class).parameters)[1:])
        raise ConfigError(f"optimizer.init_args: {error}", f"{class_name} takes {accepted}.") from None


def build_schedule(
    settings: TrainSettings, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    return get_scheduler(
        settings.lr_scheduler,
        optimizer,
        num_warmup_steps=settings.lr_warmup_steps,
        num_training_steps=total_steps,
    )
