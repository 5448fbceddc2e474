"""Optimizers by class path."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from torch import nn

from qflux.config import OptimizerSettings
from qflux.config.class_path import load_class, make
from qflux.errors import ConfigError


def build_optimizer(settings: OptimizerSettings, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """An instance of `settings.class_path`; a class or an argument that does not exist is a `ConfigError`."""
    remedy = "install the package it comes from, or use torch.optim.AdamW."
    kind = load_class("optimizer.class_path", settings.class_path, remedy)
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.class_path: {settings.class_path} is not a torch optimizer")
    if kind is torch.optim.LBFGS:
        raise ConfigError("optimizer.class_path: LBFGS evaluates the loss several times a step, which is not supported")
    odd = [key for key, value in settings.init_args.items() if isinstance(value, float) and not math.isfinite(value)]
    if odd:
        raise ConfigError(f"optimizer.init_args.{odd[0]}: {settings.init_args[odd[0]]} is not finite")
    arguments = dict(settings.init_args)
    takes_fused = "fused" in inspect.signature(kind).parameters and "foreach" not in arguments
    if takes_fused and all(parameter.is_cuda for parameter in parameters):
        arguments.setdefault("fused", True)
    optimizer = make("optimizer", kind, arguments, list(parameters))
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer
