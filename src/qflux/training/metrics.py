"""What a run reports while it goes: one `StepReport` per optimizer step, to `metrics.jsonl` and to whoever listens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from qflux.data.store import write_bytes


@dataclass(frozen=True)
class StepReport:
    """One optimizer step."""

    step: int
    """Steps done, this one included."""
    total_steps: int
    epoch: int
    loss: float
    grad_norm: float
    learning_rate: float
    samples: int
    tokens: int
    """Valid text and image tokens, all micro-batches."""
    padding_avoided: float
    """The share of a padded batch that would have been padding."""
    seconds: float


Listener = Callable[[StepReport], None]


class MetricsFile:
    """`metrics.jsonl`: one line per step. A resumed run first drops the lines of steps it is about to do again."""

    def __init__(self, path: Path, steps_done: int) -> None:
        self._path = path
        kept = [line for line in self._lines() if 0 < _step_of(line) <= steps_done]
        write_bytes(path, "".join(f"{line}\n" for line in kept).encode())

    def __call__(self, report: StepReport) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")

    def _lines(self) -> list[str]:
        return self._path.read_text(errors="replace").splitlines() if self._path.is_file() else []


def _step_of(line: str) -> int:
    """The step of a line, 0 if it is torn or foreign."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0
