"""Optimizers by class path."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from qflux.config import OptimizerSettings
from qflux.config.class_path import load_class, make
from qflux.errors import ConfigError

_UP = ".lora_B."


def build_optimizer(
    settings: OptimizerSettings, parameters: Mapping[str, nn.Parameter], plus_ratio: float = 1.0
) -> torch.optim.Optimizer:
    """An instance of `settings.class_path`; a class or an argument that does not exist is a `ConfigError`.

    With a `plus_ratio` other than 1, up projections are a group of their own, with so many times the rate.
    """
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
    if takes_fused and all(parameter.is_cuda for parameter in parameters.values()):
        arguments.setdefault("fused", True)
    groups: list[Any] = list(parameters.values())
    if plus_ratio != 1:
        ups = [parameter for name, parameter in parameters.items() if _UP in name]
        groups = [{"params": [p for name, p in parameters.items() if _UP not in name]}, {"params": ups}]
    optimizer = make("optimizer", kind, arguments, groups)
    assert isinstance(optimizer, torch.optim.Optimizer)
    if plus_ratio != 1:
        ups_group = optimizer.param_groups[-1]
        ups_group["lr"] = ups_group["lr"] * plus_ratio
    return optimizer


def ordered(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Its parameters, as it numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
