"""What a run reports while it goes: one `StepReport` per optimizer step, to `metrics.jsonl` and to whoever listens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from qflux.files.jsonl import append_line
from qflux.files.atomic import write_bytes


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
    """The step changed nothing: its loss or gradient was no number, or float16 had to find its scale."""
    skipped_steps: int
    """So far in this run, since it was last started."""
    samples: int
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


Listener = Callable[[StepReport], None]


def by_level(terms: Sequence[float], sigmas: Sequence[float]) -> list[float | None]:
    """Mean term of each quarter of noise levels."""
    quarters: list[list[float]] = [[] for _ in range(4)]
    for term, sigma in zip(terms, sigmas, strict=True):
        quarters[min(3, int(4 * sigma))].append(term)
    return [sum(quarter) / len(quarter) if quarter else None for quarter in quarters]


class LineFile:
    """A file of one JSON line per step. A resumed run first drops the lines of steps it is about to do again."""

    def __init__(self, path: Path, steps_done: int) -> None:
        self._path = path
        kept: dict[int, str] = {}
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
            step = _step_of(line)
            if step is not None and 0 <= step <= steps_done and steps_done > 0:
                kept.setdefault(step, line)
        write_bytes(path, "".join(f"{line}\n" for line in kept.values()).encode())

    def append(self, value: dict[str, Any]) -> None:
        append_line(self._path, _finite(value))


class Tracker(Protocol):
    """Where else figures go."""

    def log(self, step: int, numbers: dict[str, float]) -> None: ...

    def image(self, step: int, name: str, file: Path) -> None: ...

    def close(self) -> None: ...


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> int | None:
    """The step of a line, unless it is torn or foreign."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
