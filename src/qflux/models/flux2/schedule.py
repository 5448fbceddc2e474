"""FLUX.2's noise schedule: its shift grows with the image, and with fewer steps."""

from __future__ import annotations

from dataclasses import dataclass

from qflux.losses.timesteps import NoiseShift

_LARGE = 4300
"""Tokens beyond which the number of steps does not matter."""
_FEW, _MANY = 10, 200
"""Steps at which the two lines below were measured."""


@dataclass(frozen=True)
class Flux2Shift(NoiseShift):
    """mu lies on a line for many steps and on another for few, and between them in proportion to the steps."""

    rule: str = "flux2"
    """Tells it from other rules where it is written down."""

    def mu(self, tokens: int, steps: int) -> float:
        many = 0.00016927 * tokens + 0.45666666
        if tokens > _LARGE:
            return many
        few = 8.73809524e-05 * tokens + 1.89833333
        return many + (few - many) * (_MANY - steps) / (_MANY - _FEW)

    def __str__(self) -> str:
        return "FLUX.2's, from tokens and steps"
