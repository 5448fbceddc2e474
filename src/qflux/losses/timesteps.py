"""The noise and noise level of a sample: a function of (seed, sample, visit) and of nothing else.

Batch, rank, worker and order do not matter, so a run is the same however it is split up and wherever it is resumed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qflux.config import LossSettings, TimestepSettings
from qflux.data.store import seed_of

BASE_TOKENS, MAX_TOKENS = 256, 4096
BASE_SHIFT, MAX_SHIFT = 0.5, 1.15

LEAST_SIGMA = 1e-3
"""Below this a weight of sigma^-2 grows no further; it is the lowest noise level of a schedule of 1000 steps."""


def draw(
    seed: int, sample_id: str, visit: int, tokens: int, channels: int, settings: TimestepSettings
) -> tuple[float, Tensor]:
    """The noise level in (0, 1) and the noise `(tokens, channels)` of one visit to one sample."""
    generator = torch.Generator().manual_seed(seed_of("noise", seed, sample_id, visit))
    sigma = shifted(_density(settings, generator), tokens, settings)
    return sigma, torch.randn(tokens, channels, generator=generator)


def fixed_draw(
    seed: int, sample_id: str, level: int, levels: int, tokens: int, channels: int, settings: TimestepSettings
) -> tuple[float, Tensor]:
    """The noise level in the middle of the `level`th of `levels` equal strata, and noise that never changes."""
    generator = torch.Generator().manual_seed(seed_of("held out", seed, sample_id, level))
    sigma = shifted((level + 0.5) / levels, tokens, settings)
    return sigma, torch.randn(tokens, channels, generator=generator)


def shifted(sigma: float, tokens: int, settings: TimestepSettings) -> float:
    """A noise level after the configured shift, for a sample with this many target tokens."""
    if settings.shift == "none":
        return sigma
    factor = settings.fixed_shift if settings.shift == "fixed" else math.exp(resolution_shift(tokens))
    return factor * sigma / (1 + (factor - 1) * sigma)


def resolution_shift(tokens: int) -> float:
    """FLUX's shift exponent: linear from 0.5 at 256 tokens to 1.15 at 4096."""
    slope = (MAX_SHIFT - BASE_SHIFT) / (MAX_TOKENS - BASE_TOKENS)
    return BASE_SHIFT + slope * (tokens - BASE_TOKENS)


def level_weight(sigma: float, settings: LossSettings) -> float:
    """SD3's weight of a noise level in the loss."""
    density = settings.timesteps.density
    weighting = settings.weighting or (density if density in ("cosmap", "sigma_sqrt") else "none")
    if weighting == "sigma_sqrt":
        return max(sigma, LEAST_SIGMA) ** -2
    if weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    return 1.0


def _density(settings: TimestepSettings, generator: torch.Generator) -> float:
    """Before the shift. `cosmap` and `sigma_sqrt` are uniform here: their names are weightings of the loss."""
    if settings.density == "logit_normal":
        normal = float(torch.randn((), generator=generator, dtype=torch.float64))
        return float(torch.sigmoid(torch.tensor(settings.mean + settings.std * normal, dtype=torch.float64)))
    uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
    if settings.density == "mode":
        return 1 - uniform - settings.mode_scale * (math.cos(math.pi * uniform / 2) ** 2 - 1 + uniform)
    return uniform
