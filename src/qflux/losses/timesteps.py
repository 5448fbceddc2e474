"""The noise and noise level of a sample: a function of (seed, sample, visit) and of nothing else.

Batch, rank, worker and order do not matter, so a run is the same however it is split up and wherever it is resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from qflux.config import LossSettings, TimestepSettings
from qflux.files.hashing import seed_of

_EDGE = 1e-9
"""A normal distribution has no share 0."""
LEAST_SIGMA = 1e-3
"""Below this a weight of sigma^-2 grows no further; it is the lowest noise level of a schedule of 1000 steps."""


@dataclass(frozen=True)
class NoiseShift:
    """How a model's schedule moves noise levels up: `f s / (1 + (f - 1) s)`, with a factor f that grows with the image.

    The numbers are those of the checkpoint's scheduler, and their defaults those of diffusers' pipelines (FLUX.1's).
    Training and sampling both take them from here, so that a model is trained on the levels it will be used at.
    """

    base_tokens: int = 256
    max_tokens: int = 4096
    base_shift: float = 0.5
    max_shift: float = 1.15
    exponential: bool = True
    """The factor is `exp(mu)`; otherwise it is `mu` itself."""
    constant: float | None = None
    """The factor for images of every size, of schedulers that do not look at the size."""

    @classmethod
    def of(cls, scheduler: Any) -> NoiseShift:
        """The shift of a checkpoint's scheduler."""
        config = scheduler.config
        if not config.get("use_dynamic_shifting", False):
            return cls(constant=float(config.get("shift", 1.0)))
        return cls(
            base_tokens=int(config.get("base_image_seq_len", cls.base_tokens)),
            max_tokens=int(config.get("max_image_seq_len", cls.max_tokens)),
            base_shift=float(config.get("base_shift", cls.base_shift)),
            max_shift=float(config.get("max_shift", cls.max_shift)),
            exponential=config.get("time_shift_type", "exponential") == "exponential",
        )

    def mu(self, tokens: int, steps: int) -> float:
        """What diffusers' `set_timesteps` calls mu, for a target of this many tokens made in so many steps.

        It is linear in the tokens, whatever the steps; a family may have another rule.
        """
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        return tokens * slope + (self.base_shift - slope * self.base_tokens)

    def factor(self, tokens: int, steps: int) -> float:
        """By how much the odds of noise grow, for a target of this many tokens made in so many steps."""
        if self.constant is not None:
            return self.constant
        return math.exp(self.mu(tokens, steps)) if self.exponential else self.mu(tokens, steps)

    def __str__(self) -> str:
        if self.constant is not None:
            return f"{self.constant:g} for every size"
        return f"{self.base_shift:g} to {self.max_shift:g} over {self.base_tokens} to {self.max_tokens} tokens"


@dataclass(frozen=True)
class NoiseLevels:
    """How the noise level of a sample is drawn: the configured density, moved by the shift of the model's schedule."""

    settings: TimestepSettings
    shift: NoiseShift = NoiseShift()
    steps: int = 50
    """That an image is usually made in: the shift may depend on them."""

    def draw(self, seed: int, sample_id: str, visit: int, tokens: int, channels: int) -> tuple[float, Tensor]:
        """The noise level in (0, 1) and the noise `(tokens, channels)` of one visit to one sample."""
        generator = torch.Generator().manual_seed(seed_of("noise", seed, sample_id, visit))
        if (self.settings.low, self.settings.high) == (0, 1):
            sigma = self.shifted(_density(self.settings, generator), tokens)
        else:
            sigma = self.level(float(torch.rand((), generator=generator, dtype=torch.float64)), tokens)
        return sigma, torch.randn(tokens, channels, generator=generator)

    def level(self, share: float, tokens: int) -> float:
        """The noise level that this share of all draws lies on one side of."""
        first, last = _shares(self, tokens)
        return self.shifted(before_shift(self.settings, first + (last - first) * share), tokens)

    def fixed_draw(
        self, seed: int, sample_id: str, level: int, levels: int, tokens: int, channels: int
    ) -> tuple[float, Tensor]:
        """The noise level in the middle of the `level`th of `levels` equal strata, and noise that never changes."""
        generator = torch.Generator().manual_seed(seed_of("held out", seed, sample_id, level))
        return self.shifted((level + 0.5) / levels, tokens), torch.randn(tokens, channels, generator=generator)

    def shifted(self, sigma: float, tokens: int) -> float:
        """A noise level after the shift, for a sample with this many target tokens."""
        if self.settings.shift == "none":
            return sigma
        factor = self.settings.fixed_shift if self.settings.shift == "fixed" else self.shift.factor(tokens, self.steps)
        return factor * sigma / (1 + (factor - 1) * sigma)


@lru_cache(maxsize=4096)
def _shares(levels: NoiseLevels, tokens: int) -> tuple[float, float]:
    """Of the draws of a density as it is, the part whose levels lie between `low` and `high`."""
    settings = levels.settings
    if (settings.low, settings.high) == (0, 1):
        return 0.0, 1.0

    def level(share: float) -> float:
        return levels.shifted(before_shift(settings, share), tokens)

    rises = level(0.25) < level(0.75)
    ends = (settings.low, settings.high) if rises else (settings.high, settings.low)
    return _share_at(level, ends[0], rises), _share_at(level, ends[1], rises)


def _share_at(level: Callable[[float], float], wanted: float, rises: bool) -> float:
    """Where a curve that rises, or falls, from share 0 to share 1 has a level."""
    least, most = _EDGE, 1 - _EDGE
    for _ in range(60):
        middle = (least + most) / 2
        if (level(middle) < wanted) == rises:
            least = middle
        else:
            most = middle
    return (least + most) / 2


def level_weight(sigma: float, settings: LossSettings) -> float:
    """SD3's weight of a noise level in the loss."""
    density = settings.timesteps.density
    weighting = settings.weighting or (density if density in ("cosmap", "sigma_sqrt") else "none")
    if weighting == "sigma_sqrt":
        return max(sigma, LEAST_SIGMA) ** -2
    if weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    return 1.0


def before_shift(settings: TimestepSettings, share: float) -> float:
    """The level before the shift that this share of all draws lies on one side of."""
    if settings.density == "logit_normal":
        return _logistic(settings, NormalDist().inv_cdf(share))
    return _spread(settings, share)


def _density(settings: TimestepSettings, generator: torch.Generator) -> float:
    """Before the shift."""
    if settings.density == "logit_normal":
        return _logistic(settings, float(torch.randn((), generator=generator, dtype=torch.float64)))
    return _spread(settings, float(torch.rand((), generator=generator, dtype=torch.float64)))


def _logistic(settings: TimestepSettings, normal: float) -> float:
    return float(torch.sigmoid(torch.tensor(settings.mean + settings.std * normal, dtype=torch.float64)))


def _spread(settings: TimestepSettings, uniform: float) -> float:
    """`cosmap` and `sigma_sqrt` are uniform here: their names are weightings of the loss."""
    if settings.density == "mode":
        return 1 - uniform - settings.mode_scale * (math.cos(math.pi * uniform / 2) ** 2 - 1 + uniform)
    return uniform
