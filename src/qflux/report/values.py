"""Numbers out of the lines of a run's files, of which any may be damaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MOST = 1e150
"""Larger numbers are damage."""


def number(value: Any) -> float | None:
    """A number that can be drawn; metrics write what is none as text."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST < value < MOST:
        return None
    return float(value)


def numbers(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [value for line in lines if (value := number(line.get(key))) is not None]


def curve(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return _points((line.get("step"), line.get(key)) for line in lines)


def level_curve(lines: Sequence[dict[str, Any]], key: str, index: int) -> list[tuple[float, float]]:
    found = ((line.get("step"), line.get(key)) for line in lines)
    return _points((step, levels[index]) for step, levels in found if isinstance(levels, list) and index < len(levels))


def _points(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[float, float]]:
    found = ((number(x), number(y)) for x, y in pairs)
    return [(x, y) for x, y in found if x is not None and y is not None]


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by their dotted names."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield from flat(item, f"{prefix}.{number}")
    else:
        yield prefix, value


def at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
