"""Learning-rate schedules, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import Tensor

from qflux.config import TrainSettings
from qflux.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step, as a function of its number alone: there is nothing to save or to resume."""

    factor: Callable[[int], float]
    """Of the configured rate, at a step counted from 0."""

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            set_rate(group, float(group["initial_lr"]) * self.factor(step))


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a parameter group. Some optimizers keep it in a tensor, and want it to stay there."""
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
        factors = [factor(step) for step in range(0, total_steps, max(1, total_steps // 1000))]
        if not all(math.isfinite(value) and value >= 0 for value in factors):
            raise ValueError("its rates are not finite, or below 0")
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"train.lr_scheduler: {settings.lr_scheduler} can't be made: {error}") from None
    return Schedule(factor)
