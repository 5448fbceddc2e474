"""Euler integration of the velocity field for samples of different sizes in lockstep, each on its own schedule.

Shapes: B samples, M target tokens of the whole batch, C channels, n steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qflux.losses.timesteps import BASE_SHIFT, BASE_TOKENS, MAX_SHIFT, MAX_TOKENS


def schedules(scheduler: Any, target_tokens: Sequence[int], steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Noise levels `(n + 1, B)` to integrate over, and the levels `(n, B)` the model is told; diffusers' own.

    The shift of a sample follows from its own size, so its schedule is the one it would have alone.
    """
    columns = [_one_schedule(scheduler, tokens, steps, device) for tokens in target_tokens]
    sigmas, told = (torch.stack(list(column), dim=1) for column in zip(*columns, strict=True))
    return sigmas, told


def _one_schedule(scheduler: Any, tokens: int, steps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    own, config = copy.deepcopy(scheduler), scheduler.config
    base, top = config.get("base_image_seq_len", BASE_TOKENS), config.get("max_image_seq_len", MAX_TOKENS)
    low, high = config.get("base_shift", BASE_SHIFT), config.get("max_shift", MAX_SHIFT)
    slope = (high - low) / (top - base)
    own.set_timesteps(
        sigmas=np.linspace(1.0, 1 / steps, steps), mu=tokens * slope + (low - slope * base), device=device
    )
    return own.sigmas.to(device), own.timesteps / own.config.num_train_timesteps


def denoise(
    velocity: Callable[[Tensor, Tensor], Tensor],
    latents: Tensor,
    sample: Tensor,
    sigmas: Tensor,
    told: Tensor,
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Integrate `latents` `(M, C)` from noise to image.

    Args:
        velocity: predicts `(M, C)` from latents `(M, C)` and the level `(B,)` of each sample.
        sample: `(M,)` the sample of each token.
        sigmas, told: from `schedules`.
        on_step: called with the number of steps done and their total.
    """
    for index in range(len(told)):
        predicted = velocity(latents, told[index])
        change = (sigmas[index + 1] - sigmas[index])[sample][:, None]
        latents = (latents.float() + change * predicted).to(latents.dtype)
        if on_step:
            on_step(index + 1, len(told))
    return latents
