"""`ledger.jsonl`: which samples trained in which step of which epoch, and what was left out, and why.

{"kind": "sample", "id": …, "name": …, "source": …, "rate": …, "images": [[width, height], …]}     once per sample
{"kind": "skipped", "what": …, "source": …, "reason": …}           what the data holds and the run does not use
{"kind": "step", "step": 12, "epoch": 0, "samples": [id, …]}       all ranks together
{"kind": "left out", "step": 13, …}                                 the same, but its loss was not finite
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qflux.files.jsonl import append_line, keep_lines, read_lines

if TYPE_CHECKING:
    from qflux.data.sample import Sample
    from qflux.data.sources.listing import Fault


@dataclass(frozen=True)
class Coverage:
    """What a ledger adds up to."""

    samples: int
    trained: int
    """Samples that trained at least once."""
    visits: int
    epochs: int
    """Epochs begun."""
    skipped: tuple[str, ...]
    noises: int = 0
    """Noisy targets of all visits."""

    def __str__(self) -> str:
        drawn = f" with {self.noises} noises" if self.noises > self.visits else ""
        text = f"{self.trained} of {self.samples} samples trained, {self.visits} visits{drawn} in {self.epochs} epochs"
        return text + (f", {len(self.skipped)} skipped" if self.skipped else "")


class Ledger:
    """The ledger of a run that goes. A resumed run first drops the lines of steps it is about to do again."""

    def __init__(
        self,
        path: Path,
        samples: Sequence[Sample],
        skipped: Iterable[Fault],
        steps_done: int = 0,
        pixels_per_token: int = 16,
    ) -> None:
        self._path = path
        head = [_sample(sample, pixels_per_token) for sample in samples] + [_skipped(fault) for fault in skipped]
        keep_lines(path, lambda line: _is_step(line) and line["step"] <= steps_done, head)

    def record(self, step: int, epoch: int, samples: Iterable[Sample], noises: int = 1, left_out: bool = False) -> None:
        """Step `step`, counted from 1, is done, with so many noises of each sample; or its loss was not finite, and it
        was left out."""
        kind, ids = "left out" if left_out else "step", [sample.id for sample in samples]
        drawn = {"noises": noises} if noises > 1 else {}
        append_line(self._path, {"kind": kind, "step": step, "epoch": epoch, "samples": ids, **drawn})


def coverage(path: Path) -> Coverage:
    """The sum of a ledger."""
    samples, skipped, epochs, noises = set(), [], set(), 0
    visits: Counter[str] = Counter()
    for line in read_ledger(path):
        if line["kind"] == "sample":
            samples.add(str(line.get("id")))
        elif line["kind"] == "skipped":
            skipped.append(f"{line.get('what')}: {line.get('reason')}")
        elif line["kind"] == "step" and _is_step(line):
            visits.update(map(str, line["samples"]))
            noises += len(line["samples"]) * int(line.get("noises", 1))
            epochs.add(line["epoch"])
    trained = len(samples & visits.keys())  # samples that are gone by now may have trained too
    return Coverage(len(samples), trained, visits.total(), len(epochs), tuple(skipped), noises)


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a ledger; a torn one, which a kill can leave at the end, is left out."""
    return (line for line in read_lines(path) if "kind" in line)


def trained_ids(path: Path) -> dict[str, str]:
    """The ids of the samples that a run has trained on, by name."""
    return {str(line.get("name")): str(line.get("id")) for line in read_ledger(path) if line["kind"] == "sample"}


def _is_step(line: dict[str, Any]) -> bool:
    """A line about a step, and not a foreign one."""
    kinds = isinstance(line.get("step"), int), isinstance(line.get("samples"), list), isinstance(line.get("epoch"), int)
    return line.get("kind") in ("step", "left out") and all(kinds)


def _skipped(fault: Fault) -> dict[str, Any]:
    return {"kind": "skipped", "what": fault.what, "source": fault.source, "reason": fault.problem}


def _sample(sample: Sample, pixels: int) -> dict[str, Any]:
    return {
        "kind": "sample",
        "id": sample.id,
        "name": sample.name,
        "source": sample.source,
        "target": sample.place,
        "rate": sample.rate,
        "images": [[pixels * columns, pixels * rows] for _, rows, columns in sample.shapes.images],
    }
