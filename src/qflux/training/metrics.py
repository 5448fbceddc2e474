"""What a run reports while it goes: one `StepReport` per optimizer step, to `metrics.jsonl` and to whoever listens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


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
        kept = [line for line in self._lines() if json.loads(line)["step"] <= steps_done]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in kept))

    def __call__(self, report: StepReport) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")

    def _lines(self) -> list[str]:
        if not self._path.is_file():
            return []
        lines = self._path.read_text().splitlines()
        return [line for line in lines if line.endswith("}")]
