"""The figures of a step: gathered on the device while it runs, read on the host when they arrive.

Shapes: S samples of the whole step, all ranks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from qflux.data.batch import EditBatch
from qflux.data.plan import PlannedStep
from qflux.ragged.layout import padding_ratio
from qflux.runs.metrics import StepReport, by_level
from qflux.training.distributed import World
from qflux.training.flops import StepFlops
from qflux.training.optimizer.step import Taken

ROWS = 3
"""Term, noise level and weight in the loss of every sample."""


class StepFigures:
    """What one rank's micro-batches contribute to the figures of a step."""

    def __init__(self, step: PlannedStep, world: World, device: torch.device) -> None:
        counts = [sum(map(len, rank)) for rank in step.ranks]
        self._before, self._after = sum(counts[: world.rank]), sum(counts[world.rank + 1 :])
        self._world = world
        self._parts = [torch.zeros(ROWS, 0, device=device)]
        self._lengths: list[int] = []

    def add(self, terms: Tensor, batch: EditBatch) -> None:
        """The samples of a micro-batch that counts."""
        self._parts.append(torch.stack([terms.detach(), batch.sigma, batch.weight]))
        self._lengths += batch.lengths

    def gathered(self) -> Tensor:
        """`(ROWS, S)` of all ranks."""
        own = torch.cat(self._parts, dim=1)
        return self._world.sum_(torch.nn.functional.pad(own, (self._before, self._after)))

    def lengths(self) -> list[int]:
        """Tokens of each sample of the step, of all ranks; they are known on the host."""
        own = torch.tensor([0] * self._before + self._lengths + [0] * self._after)
        return self._world.sum_(own).tolist()


class StepClock:
    """How long a step takes, and how much of that is waiting for data."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.waiting = 0.0

    @contextmanager
    def waits(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waiting += time.perf_counter() - began

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and those of them spent waiting."""
        now = time.perf_counter()
        lap, waited = now - self._last, self.waiting
        self._last, self.waiting = now, 0.0
        return lap, waited


@dataclass(frozen=True)
class StepNote:
    """What the host knows of a step before its figures arrive."""

    number: int
    """Steps before it."""
    total: int
    step: PlannedStep
    learning_rate: float
    lengths: Sequence[int]
    seconds: float
    waiting_seconds: float
    peak_memory_gib: float | None


@dataclass
class Reporter:
    """Turns the figures of a step into its report."""

    flops: StepFlops
    peak: float | None
    """FLOP/s of all devices together."""
    padded: bool = False
    """Batches are padded, as the reference."""
    skipped: int = field(default=0)

    def report(self, note: StepNote, values: Sequence[float]) -> StepReport:
        grad_norm, skipped, _, *rest = values
        count = note.step.samples
        terms, sigmas, weights = (rest[count * row : count * (row + 1)] for row in range(ROWS))
        self.skipped += int(skipped)
        tokens = sum(note.lengths)
        used = self.flops(note.lengths) / note.seconds
        return StepReport(
            step=note.number + 1,
            total_steps=note.total,
            epoch=note.step.epoch,
            loss=math.fsum(term * weight for term, weight in zip(terms, weights, strict=True)),
            loss_by_level=by_level(terms, sigmas),
            grad_norm=grad_norm,
            learning_rate=note.learning_rate,
            skipped=bool(skipped),
            skipped_steps=self.skipped,
            samples=count,
            tokens=tokens,
            padding_avoided=0.0 if self.padded else _padding(note),
            padding_ratio=_padding(note) if self.padded else 0.0,
            seconds=note.seconds,
            waiting_seconds=note.waiting_seconds,
            tokens_per_second=tokens / note.seconds,
            samples_per_second=count / note.seconds,
            utilisation=used / self.peak if self.peak else None,
            peak_memory_gib=note.peak_memory_gib,
        )


def packed(taken: Taken, gathered: Tensor) -> Tensor:
    """Everything that has to reach the host, as one vector."""
    return torch.cat([torch.stack([taken.grad_norm, taken.skipped, taken.broken]), gathered.flatten()])


def is_broken(values: Sequence[float]) -> bool:
    return bool(values[2])


def broken_samples(step: PlannedStep, values: Sequence[float]) -> list[int]:
    """The samples whose loss is no number; all of the step if only the gradient is none."""
    terms = values[3 : 3 + step.samples]
    bad = [visit.sample for visit, term in zip(step.visits, terms, strict=True) if not math.isfinite(term)]
    return bad or [visit.sample for visit in step.visits]


def _padding(note: StepNote) -> float:
    lengths = iter(note.lengths)
    batches = [[next(lengths) for _ in batch] for rank in note.step.ranks for batch in rank if batch]
    return padding_ratio(*batches)


T = TypeVar("T")


class Readback(Generic[T]):
    """A queue of small tensors on their way to the host, each with a note of what it belongs to.

    The host goes on queueing work meanwhile; on a GPU the figures of a step arrive during the next one.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[T, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, note: T, values: Tensor) -> None:
        """Send `values` `(n,)` off."""
        if not values.is_cuda:
            self._pending.append((note, values.detach().clone(), None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values.detach(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append((note, host, arrived))

    def clear(self) -> None:
        """Forget what is under way."""
        self._pending.clear()

    def arrived(self, wait: bool = False) -> Iterator[tuple[T, list[float]]]:
        """What is here by now, in order; with `wait`, everything."""
        while self._pending:
            note, host, arrived = self._pending[0]
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            self._pending.popleft()
            yield note, host.tolist()
