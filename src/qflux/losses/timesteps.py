"""The noise and noise level of a sample: a function of (seed, sample, visit) and of nothing else.

Batch, rank, worker and order do not matter, so a run is the same however it is split up and wherever it is resumed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qflux.config import TimestepSettings
from qflux.data.store import seed_of

BASE_TOKENS, MAX_TOKENS = 256, 4096
BASE_SHIFT, MAX_SHIFT = 0.5, 1.15


def draw(
    seed: int, sample_id: str, visit: int, tokens: int, channels: int, settings: TimestepSettings
) -> tuple[float, Tensor]:
    """The noise level in (0, 1) and the noise `(tokens, channels)` of one visit to one sample."""
    generator = torch.Generator().manual_seed(seed_of("noise", seed, sample_id, visit))
    sigma = shifted(_density(settings, generator), tokens, settings)
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


def _density(settings: TimestepSettings, generator: torch.Generator) -> float:
    if settings.density == "uniform":
        return float(torch.rand((), generator=generator, dtype=torch.float64))
    normal = float(torch.randn((), generator=generator, dtype=torch.float64))
    return float(torch.sigmoid(torch.tensor(settings.mean + settings.std * normal, dtype=torch.float64)))
