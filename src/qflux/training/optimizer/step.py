"""The optimizer step: reduce, clip, take it unless it is not finite, let the average follow.

Everything is decided on the device. A step whose loss or gradient is NaN or infinite changes nothing; that it happened
is read later, with the step's other metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qflux.training.distributed import World, local
from qflux.training.optimizer.ema import Ema
from qflux.training.optimizer.loss_scale import LossScale
from qflux.training.optimizer.schedule import Schedule


@dataclass(frozen=True)
class Outcome:
    """What became of a step, on the device."""

    grad_norm: Tensor
    skipped: Tensor
    """1.0 if the step changed nothing, else 0.0."""
    broken: Tensor
    """1.0 if the loss is not finite, or the gradient is not and float16 is not the reason."""


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
        # torch's fused optimizers can be told on the device to skip a step; others need an answer on the host.
        self._decides_on_device = getattr(optimizer, "_step_supports_amp_scaling", False)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        (loss if self.loss_scale is None else loss * self.loss_scale.scale).backward()

    def apply(self, step: int, loss: Tensor) -> Outcome:
        """Take a step, counted from 0, of which `loss` is the loss over all ranks."""
        parameters = list(self.parameters.values())
        self._world.sum_gradients(parameters)
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
        self.schedule.set(self.optimizer, step)
        self._step(skipped)
        if self.loss_scale is not None:
            self.loss_scale.update((~finite).float())
        if self.ema is not None:
            self.ema.follow(step, skipped)
        self.optimizer.zero_grad()
        return Outcome(norm, skipped, broken)

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


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of parameters lie in the same place in every step; who has none in a step has none.

    A gradient stays until the end of the step. Made anew each time, it goes where memory of a GPU is free: into the
    hole that the activations of a block have left, and those of the next block do not fit there any more. On a card
    that is nearly full, memory was then given back and taken again twenty times a step.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_Place(parameter))


class _Place:
    """Where the gradient of a parameter lies."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._memory = torch.empty_like(parameter.detach())

    def __call__(self, parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None and not grad.requires_grad and grad.data_ptr() != self._memory.data_ptr():
            parameter.grad = self._memory.copy_(grad)
