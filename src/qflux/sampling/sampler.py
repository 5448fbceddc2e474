"""Euler integration of the velocity field for samples of different sizes in lockstep, each on its own schedule.

Shapes: B samples, M target tokens of the whole batch, C channels, n steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qflux.data.encoded import TextEmbedding
from qflux.data.images.sizes import Box
from qflux.errors import ConfigError
from qflux.losses.timesteps import NoiseShift
from qflux.models.family import Family, ModelInputs
from qflux.ragged.interleave import Interleave
from qflux.ragged.prefix import PrefixMemory
from qflux.ragged.shapes import ImageShape, Shapes

Levels = NDArray[np.float64]
OnStep = Callable[[int, int], None]
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Prepared:
    """An edit as the transformer sees it. A negative prompt switches true classifier-free guidance on."""

    noise: Tensor
    """`(m, C)`"""
    controls: Tensor
    """`(k, C)`"""
    shapes: Shapes
    text: TextEmbedding
    negative: TextEmbedding | None = None
    exact: tuple[int, int] | None = None
    """`(width, height)` that the finished image is brought to, where that is no whole number of tokens."""
    kept: Box | None = None
    """What of the finished image is kept, where more was made than asked for."""

    @property
    def target(self) -> ImageShape:
        """The image to make."""
        (shape,) = self.shapes.targets
        return shape

    def to(self, device: torch.device | str) -> Prepared:
        """The same on another device."""
        return replace(
            self,
            noise=self.noise.to(device),
            controls=self.controls.to(device),
            text=self.text.to(device),
            negative=None if self.negative is None else self.negative.to(device),
        )


class Sampler:
    """From noise to images, for edits of any sizes and control counts at once."""

    def __init__(
        self,
        family: Family,
        transformer: nn.Module,
        scheduler: Any,
        sigmas: Sequence[float] = (),
        keep_prefix: bool = True,
    ) -> None:
        """`sigmas` are the noise levels of that many steps, before the shift, where they are not spread evenly.

        With `keep_prefix`, what does not depend on the noise runs once.
        """
        self._keep_prefix = keep_prefix and family.facts.shares_prefix
        self._family = family
        self._transformer = transformer
        self._scheduler = scheduler
        self._sigmas = sigmas

    @torch.no_grad()
    def __call__(
        self,
        edits: Sequence[Prepared],
        steps: int,
        guidance: float,
        true_cfg_scale: float,
        on_step: OnStep | None = None,
    ) -> list[Tensor]:
        """Denoised target tokens `(m, C)` of every edit; each is what it would be alone."""
        targets = [edit.shapes.target_tokens for edit in edits]
        noise = torch.cat([edit.noise for edit in edits])
        sample = Interleave.build(targets, [0] * len(targets), noise.device).first_sample
        velocity = self._velocity(edits, targets, guidance, true_cfg_scale)
        shift = self._family.noise_shift(self._scheduler)
        levels = np.array(self._sigmas) if len(self._sigmas) == steps else np.linspace(1.0, 1 / steps, steps)
        sigmas, timesteps = schedules(self._scheduler, shift, targets, levels, noise.device)
        return list(denoise(velocity, noise, sample, sigmas, timesteps, on_step).split(targets))

    def _velocity(self, edits: Sequence[Prepared], targets: list[int], guidance: float, scale: float) -> Velocity:
        """The guided velocity of all edits; conditional and unconditional samples run in one ragged batch."""
        guided = [index for index, edit in enumerate(edits) if edit.negative is not None and scale > 1]
        rows = [*range(len(edits)), *guided]
        shapes = [edits[row].shapes for row in rows]
        text = [edit.text for edit in edits] + [edits[row].negative or edits[row].text for row in guided]
        controls = torch.cat([edits[row].controls for row in rows])
        lengths = [targets[row] for row in rows]
        images = Interleave.build(lengths, [len(edits[row].controls) for row in rows], controls.device)
        memory = PrefixMemory() if self._keep_prefix else None

        def velocity(latents: Tensor, sigma: Tensor, onward: Tensor) -> Tensor:
            parts = latents.split(targets)
            noisy = torch.cat([parts[row] for row in rows])
            inputs = ModelInputs(
                images.join(noisy, controls), shapes, text, sigma[rows], guidance, onward=onward[rows], memory=memory
            )
            predicted = list(images.split(self._family.velocity(self._transformer, inputs))[0].split(lengths))
            for place, row in enumerate(guided):
                predicted[row] = self._family.combine(predicted[row], predicted[len(edits) + place], scale)
            return torch.cat(predicted[: len(edits)])

        return velocity


def schedules(
    scheduler: Any, shift: NoiseShift, target_tokens: Sequence[int], levels: Levels, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Noise levels `(n + 1, B)` to integrate over, and the timesteps `(n, B)` in [0, 1] of the model; diffusers' own,
    from the levels `(n,)` before the shift.

    The shift of a sample follows from its own size, so its schedule is the one it would have alone.
    """
    columns = [_one_schedule(scheduler, shift, tokens, levels, device) for tokens in target_tokens]
    sigmas, timesteps = (torch.stack(list(column), dim=1) for column in zip(*columns, strict=True))
    return sigmas, timesteps


def _one_schedule(
    scheduler: Any, shift: NoiseShift, tokens: int, levels: Levels, device: torch.device
) -> tuple[Tensor, Tensor]:
    own = copy.deepcopy(scheduler)
    mu = None if shift.constant is not None else shift.mu(tokens, len(levels))
    own.set_timesteps(sigmas=levels, mu=mu, device=device)
    if not bool(torch.isfinite(own.sigmas).all()):
        raise ConfigError(f"num_inference_steps: {len(levels)} gives this model no schedule", "use at least 2.")
    return own.sigmas.to(device), own.timesteps / own.config.num_train_timesteps


def denoise(
    velocity: Velocity,
    latents: Tensor,
    sample: Tensor,
    sigmas: Tensor,
    timesteps: Tensor,
    on_step: OnStep | None = None,
) -> Tensor:
    """Integrate `latents` `(M, C)` from noise to image.

    Args:
        velocity: predicts `(M, C)` from latents `(M, C)`, the level `(B,)` of each sample and the one it goes on to.
        sample: `(M,)` the sample of each token.
        sigmas, timesteps: from `schedules`.
        on_step: called with the number of steps done and their total.
    """
    levels = torch.cat([timesteps, torch.zeros_like(timesteps[:1])])
    for index in range(len(timesteps)):
        predicted = velocity(latents, levels[index], levels[index + 1])
        change = (sigmas[index + 1] - sigmas[index])[sample][:, None]
        latents = (latents.float() + change * predicted).to(latents.dtype)
        if on_step:
            on_step(index + 1, len(timesteps))
    return latents
