"""What a run reports while it goes: a `StepReport` per optimizer step, a `ValidationReport` per validation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from qflux.files.atomic import write_bytes
from qflux.files.jsonl import append_line, finite, keep_lines, read_lines


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, all ranks together."""

    step: int
    """Steps done, this one included."""
    total_steps: int
    epoch: int
    loss: float
    loss_by_level: list[float | None]
    """Mean term of samples whose noise level was in [0, 0.25), [0.25, 0.5), [0.5, 0.75), [0.75, 1]."""
    grad_norm: float
    learning_rate: float
    skipped: bool
    """The step changed nothing: its loss or gradient was not finite, or float16 had to find its scale."""
    skipped_steps: int
    """So far in this run, since it was last started."""
    samples: int
    """Visits to samples."""
    noises: int
    """Noisy targets: as many, or `train.noises_per_sample` times as many."""
    tokens: int
    """Valid text and image tokens."""
    padding_avoided: float
    """The share of padded batches that would have been padding; 0 where they are padded."""
    padding_ratio: float
    """The share of what was computed that is padding: 0, but for `train.execution: padded`."""
    seconds: float
    waiting_seconds: float
    """Of these, waiting for data."""
    tokens_per_second: float
    samples_per_second: float
    noises_per_second: float
    utilisation: float | None
    """Model FLOP per second over the devices' peak, where it is known."""
    peak_memory_gib: float | None
    """Allocated on this process's device, so far."""

    def numbers(self) -> dict[str, float]:
        """What trackers draw."""
        values = asdict(self)
        levels = values.pop("loss_by_level")
        for key in ("step", "total_steps"):
            del values[key]
        values |= {f"loss_by_level/{index + 1}": level for index, level in enumerate(levels)}
        return {f"train/{key}": float(value) for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class ValidationReport:
    """What was found at one checkpoint. What was not measured is left out of its line."""

    step: int
    """Steps done."""
    held_out_loss: float | None = None
    held_out_loss_by_level: list[float] | None = None
    """The same for each noise level, the least noise first."""
    drifts: list[dict[str, Any]] = field(default_factory=list)
    """How far each edit has moved what it should have left alone."""
    drift: float | None = None
    """The mean displacement of those that are certain."""
    edits: list[dict[str, Any]] = field(default_factory=list)
    """What each edit did besides (`measures.edit`); below, the means."""
    outside_colour: float | None = None
    outside_ssim: float | None = None
    cast: float | None = None
    blur: float | None = None
    done: float | None = None
    perceptual: dict[str, float] | None = None
    """What networks found, by their names."""

    def line(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, [], {})}

    def numbers(self) -> dict[str, float]:
        """What trackers draw."""
        values = self.line() | (self.perceptual or {})
        return {f"validation/{key}": value for key, value in values.items() if isinstance(value, float)}


Listener = Callable[[StepReport], None]
R = TypeVar("R", StepReport, ValidationReport)


def by_level(terms: Sequence[float], sigmas: Sequence[float]) -> list[float | None]:
    """Mean term of each quarter of noise levels."""
    quarters: list[list[float]] = [[] for _ in range(4)]
    for term, sigma in zip(terms, sigmas, strict=True):
        quarters[min(3, int(4 * sigma))].append(term)
    return [sum(quarter) / len(quarter) if quarter else None for quarter in quarters]


class StepFile:
    """A file of one JSON line per step. A resumed run first drops the lines of steps it is about to do again."""

    def __init__(self, path: Path, steps_done: int) -> None:
        self._path = path
        kept: dict[int, dict[str, Any]] = {}
        for line in read_lines(path) if steps_done > 0 else ():
            step = line.get("step")
            if isinstance(step, int) and 0 <= step <= steps_done:
                kept.setdefault(step, line)
        write_bytes(path, "".join(json.dumps(line) + "\n" for line in kept.values()).encode())
        self._last = max(kept, default=-1)

    def append(self, value: dict[str, Any]) -> None:
        """Add the line of a step. One that is looked at again, as after a full disk, has its newest line alone."""
        step = value["step"]
        if step <= self._last:
            keep_lines(self._path, lambda line: isinstance(line.get("step"), int) and line["step"] < step)
        append_line(self._path, finite(value))
        self._last = step


def parsed(kind: type[R], line: dict[str, Any]) -> R | None:
    """A line of a file as what it was; none if it lacks something, or is not of this version."""
    known = {item.name for item in fields(kind)}
    try:
        return kind(**{key: _number(value) for key, value in line.items() if key in known})
    except TypeError:
        return None


def _number(value: Any) -> Any:
    """NaN and infinities are written as text."""
    return float(value) if value in ("nan", "inf", "-inf") else value
