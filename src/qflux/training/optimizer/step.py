"""The optimizer step: reduce, clip, take it unless it is no number, let the average follow.

Everything is decided on the device. A step whose loss or gradient is no number changes nothing; that it happened is
read later, with the step's other figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qflux.config import EmaSettings
from qflux.training.distributed import World, local
from qflux.training.optimizer.build import Schedule


class LossScale:
    """What float16 losses are multiplied by, so that small gradients do not vanish; follows overflows."""

    START, LEAST, GROWTH_INTERVAL = 2.0**16, 1.0, 2000

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(self.START, device=device)
        self.good_steps = torch.zeros((), device=device)

    def update(self, overflow: Tensor) -> None:
        """`overflow` is 1.0 or 0.0: halve the scale, or double it after a long time without."""
        grown = self.good_steps + 1 >= self.GROWTH_INTERVAL
        self.scale *= torch.where(overflow > 0, 0.5, torch.where(grown, 2.0, 1.0))
        self.scale.clamp_(min=self.LEAST)
        self.good_steps.copy_(torch.where((overflow > 0) | grown, 0.0, self.good_steps + 1))

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}


class Ema:
    """A running average of parameters."""

    def __init__(self, settings: EmaSettings, parameters: Mapping[str, nn.Parameter]) -> None:
        self._settings = settings
        self._parameters = parameters
        self.average = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def follow(self, number: int, skipped: Tensor) -> None:
        """Move towards the parameters after step `number`; not at all if it was skipped."""
        decay = (
            min(self._settings.decay, (1 + number) / (10 + number)) if self._settings.warmup else self._settings.decay
        )
        weight = (1 - decay) * (1 - skipped)
        for name, parameter in self._parameters.items():  # one at a time: no second copy of a whole model
            local(self.average[name]).lerp_(local(parameter), weight)

    def swap(self) -> None:
        """Exchange average and parameters; a second time puts them back."""
        for name, parameter in self._parameters.items():
            kept = local(parameter).clone()
            local(parameter).copy_(local(self.average[name]))
            local(self.average[name]).copy_(kept)


@dataclass(frozen=True)
class Taken:
    """What became of a step, on the device."""

    grad_norm: Tensor
    skipped: Tensor
    """1.0 if the step was left out, else 0.0."""
    broken: Tensor
    """1.0 if the loss is no number, or the gradient is none and float16 is not the reason."""


class Update:
    """Everything that changes parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        world: World,
        *,
        max_norm: float | None,
        stop_when_broken: bool,
        ema: Ema | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.schedule = schedule
        self.ema = ema
        self.loss_scale = loss_scale
        self._world = world
        self._max_norm = max_norm
        self._stops = stop_when_broken
        self._stopped: Tensor | None = None
        # torch's fused optimizers can be told on the device to leave a step out; others need an answer on the host.
        self._decides_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)

    def backward(self, loss: Tensor) -> None:
        (loss if self.loss_scale is None else loss * self.loss_scale.scale).backward()

    def apply(self, number: int, loss: Tensor) -> Taken:
        """Take step `number`, counted from 0, of which `loss` is the loss over all ranks."""
        parameters = list(self.parameters.values())
        self._world.add_up(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = self._clip(gradients)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        broken = (~finite).float()
        if self.loss_scale is not None:  # an overflow is routine, unless there is no smaller scale to go to
            at_least = self.loss_scale.scale <= LossScale.LEAST
            broken = (~torch.isfinite(loss) | (~finite & at_least)).float()
        skipped = (~finite).float()
        if self._stops:
            self._stopped = broken if self._stopped is None else torch.maximum(broken, self._stopped)
            skipped = torch.maximum(skipped, self._stopped)
        self.schedule.set(self.optimizer, number)
        self._step(skipped)
        if self.loss_scale is not None:
            self.loss_scale.update((~finite).float())
        if self.ema is not None:
            self.ema.follow(number, skipped)
        self.optimizer.zero_grad()
        return Taken(norm, skipped, broken)

    def _clip(self, gradients: list[Tensor]) -> Tensor:
        """Scale gradients back and down to the largest norm allowed; the norm before that."""
        norm = self._world.norm(gradients)
        scale = None
        if self.loss_scale is not None:
            scale = 1 / self.loss_scale.scale
            norm = norm * scale
        if self._max_norm is not None:
            down = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
            scale = down if scale is None else scale * down
        if scale is not None:
            torch._foreach_mul_([local(gradient) for gradient in gradients], scale)
        return norm

    def _step(self, skipped: Tensor) -> None:
        optimizer: Any = self.optimizer
        # torch makes the momentum of fused SGD in its first step, and leaves it unset if that one is left out.
        if self._decides_on_device and (optimizer.state or not isinstance(optimizer, torch.optim.SGD)):
            optimizer.grad_scale, optimizer.found_inf = None, skipped
            optimizer.step()
        elif not bool(skipped):
            optimizer.step()
