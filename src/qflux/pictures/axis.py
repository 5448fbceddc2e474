"""Axes of charts: round numbers, and where a value lies between the ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

WIDE = 30.0
"""Values that differ by more than this factor are unreadable on a linear axis."""
FEW = 24
"""Up to so many points of a curve are marked: it shows where something was measured."""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with round numbers to mark."""

    low: float
    high: float
    marks: tuple[float, ...]
    logarithmic: bool = False

    @classmethod
    def linear(cls, values: Iterable[float]) -> Axis:
        """From zero; curves may go beyond the outermost round number."""
        found = [0.0, *values]
        marks = ticks(min(found), max(found))
        return cls(min(marks[0], *found), max(marks[-1], *found), tuple(marks))

    @classmethod
    def for_loss(cls, values: Iterable[float], logarithmic: bool | None = None) -> Axis:
        """Logarithmic where a loss falls that far, linear otherwise; or as somebody says."""
        found = list(values)
        low, high = min(found), max(found)
        if low <= 0 or not (falls_far(found) if logarithmic is None else logarithmic):
            return cls.linear(found)
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        digits = (1, 2, 5) if last - first <= 3 else (1,)
        marks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        inside = [mark for mark in marks if low <= mark <= high] or [low, high]
        return cls(low, high, tuple(inside), logarithmic=True)

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / ((high - low) or 1)


def falls_far(values: Iterable[float]) -> bool:
    """Whether values are so different that small ones could not be told apart on a linear axis."""
    found = list(values)
    return bool(found) and min(found) > 0 and max(found) > WIDE * min(found)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover a range."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(max(span / count, 1e-300)))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= count)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def label(value: float) -> str:
    """A number for an axis."""
    return f"{value:,.7g}" if abs(value) < 1e7 else f"{value:.7g}"
