"""The metrics of a step: collected on the device while it runs, sent off, and read on the host when they arrive.

The host goes on queueing work meanwhile; on a GPU the metrics of a step arrive during the next one.

Shapes: S noisy samples of a step, all ranks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from qflux.capacity.flops import StepFlops
from qflux.data.batch import Batch
from qflux.data.sample import Sample
from qflux.ragged.layout import padding_ratio
from qflux.ragged.shapes import Shapes
from qflux.runs.metrics import StepReport, by_level
from qflux.training.batches import Step
from qflux.training.distributed import World
from qflux.training.optimizer.step import Outcome

T = TypeVar("T")


@dataclass(frozen=True)
class StepValues:
    """What the device knows of a step, on the host."""

    grad_norm: float
    skipped: bool
    """The step changed nothing."""
    broken: bool
    """Its loss or gradient is NaN or infinite, and float16 is not the reason."""
    terms: list[float]
    """`(S,)` of each noisy sample in the loss."""
    sigmas: list[float]
    weights: list[float]

    @property
    def loss(self) -> float:
        return math.fsum(term * weight for term, weight in zip(self.terms, self.weights, strict=True))


@dataclass(frozen=True)
class SampleValues:
    """What the device knows of the noisy samples of a step: `(S,)` each."""

    terms: Tensor
    sigmas: Tensor
    weights: Tensor

    @property
    def loss(self) -> Tensor:
        """Of the step, over all ranks."""
        return (self.terms * self.weights).sum()

    def packed(self, outcome: Outcome) -> Tensor:
        """Everything that has to reach the host, as one vector: one copy, one wait."""
        head = torch.stack([outcome.grad_norm, outcome.skipped, outcome.broken])
        return torch.cat([head, self.terms, self.sigmas, self.weights])


def unpacked(values: Sequence[float]) -> StepValues:
    """The inverse of `SampleValues.packed`, on the host."""
    grad_norm, skipped, broken, *rest = values
    count = len(rest) // 3
    terms, sigmas, weights = rest[:count], rest[count : 2 * count], rest[2 * count :]
    return StepValues(grad_norm, bool(skipped), bool(broken), terms, sigmas, weights)


@dataclass(frozen=True)
class StepNote:
    """What the host knows of a step before its values arrive."""

    step: Step
    total: int
    learning_rate: float
    lengths: list[int]
    """Tokens of each visit, all ranks."""
    pairs: int
    """Of tokens of which one sees the other."""
    seconds: float
    waiting_seconds: float
    peak_memory_gib: float | None


@dataclass(frozen=True)
class StepMetrics:
    """A step whose values have arrived."""

    note: StepNote
    values: StepValues

    @property
    def step(self) -> Step:
        return self.note.step

    @property
    def broken_samples(self) -> list[Sample]:
        """The samples whose loss is not finite; all of the step if only the gradient is not."""
        samples, terms = self.step.samples, self.values.terms
        noises = len(terms) // len(samples)
        bad = [
            sample
            for place, sample in enumerate(samples)
            if not all(map(math.isfinite, terms[noises * place : noises * (place + 1)]))
        ]
        return bad or list(samples)


class Clock:
    """How long a step takes, and how much of that is waiting for data."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._waiting = 0.0

    def waits(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; the time until each of them is there counts as waiting."""
        iterator = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._waiting += time.perf_counter() - began
            yield item

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and those of them spent waiting."""
        now = time.perf_counter()
        lap, waited = now - self._last, self._waiting
        self._last, self._waiting = now, 0.0
        return lap, waited


class Metrics:
    """Collects the metrics of one step after the other, and gives them back when they have arrived."""

    def __init__(self, world: World, device: torch.device, noises: int, pairs: Callable[[int, Shapes], int]) -> None:
        """`noises` are drawn at a visit; `pairs` of tokens see each other in a sequence."""
        self.clock = Clock()
        self._noises = noises
        self._pairs = pairs
        self._world = world
        self._device = device
        self._parts: list[Tensor] = []
        self._lengths: list[int] = []
        self._seen: list[int] = []
        """Pairs of tokens of each visit."""
        self._pending: deque[tuple[StepNote, Tensor, torch.cuda.Event | None]] = deque()

    def begin(self) -> None:
        self._parts = [torch.zeros(3, 0, device=self._device)]
        self._lengths, self._seen = [], []

    def add(self, batch: Batch, terms: Tensor) -> None:
        """The samples of a micro-batch; a stand-in does not count."""
        if batch.counts:
            self._parts.append(torch.stack([terms.detach(), batch.sigma, batch.weight]))
            self._lengths += batch.lengths
            self._seen += batch.per_sample(self._pairs)

    def gather(self, step: Step) -> SampleValues:
        """The noisy samples of all ranks, in the order of the plan."""
        before, after = (self._noises * count for count in self._around(step))
        own = torch.nn.functional.pad(torch.cat(self._parts, dim=1), (before, after))
        return SampleValues(*self._world.sum_(own))

    def send(self, step: Step, total: int, learning_rate: float, packed: Tensor) -> None:
        """Send the values of a step off to the host; nothing waits for them."""
        before, after = self._around(step)
        rows = [[0] * before + own + [0] * after for own in (self._lengths, self._seen)]  # known on the host
        is_cuda = self._device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self._device) / 2**30 if is_cuda else None
        lengths, seen = self._world.sum_(torch.tensor(rows)).tolist()
        note = StepNote(step, total, learning_rate, lengths, sum(seen), *self.clock.lap(), memory)
        if not packed.is_cuda:
            self._pending.append((note, packed.detach().clone(), None))
            return
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed.detach(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append((note, host, arrived))

    def arrived(self, wait: bool = False) -> Iterator[StepMetrics]:
        """What is here by now, in order; with `wait`, everything."""
        while self._pending:
            note, host, arrived = self._pending[0]
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            self._pending.popleft()
            yield StepMetrics(note, unpacked(host.tolist()))

    def forget(self) -> None:
        """Drop what is under way: steps behind one that must not be survived."""
        self._pending.clear()

    def _around(self, step: Step) -> tuple[int, int]:
        """Visits of the step on the ranks before this one and behind it."""
        counts = [sum(map(len, rank)) for rank in step.planned.ranks]
        return sum(counts[: self._world.rank]), sum(counts[self._world.rank + 1 :])


@dataclass
class Reporter:
    """Turns the metrics of a step into its report."""

    flops: StepFlops
    peak: float | None
    """FLOP/s of all devices together."""
    padded: bool = False
    """Batches are padded, as the reference."""
    skipped: int = 0
    """Steps that changed nothing, so far."""

    def report(self, metrics: StepMetrics) -> StepReport:
        note, values = metrics.note, metrics.values
        self.skipped += values.skipped
        tokens, count, noises = sum(note.lengths), len(note.lengths), len(values.terms)
        padding = _padding(note)
        return StepReport(
            step=note.step.number + 1,
            total_steps=note.total,
            epoch=note.step.epoch,
            loss=values.loss,
            loss_by_level=by_level(values.terms, values.sigmas),
            grad_norm=values.grad_norm,
            learning_rate=note.learning_rate,
            skipped=values.skipped,
            skipped_steps=self.skipped,
            samples=count,
            noises=noises,
            tokens=tokens,
            padding_avoided=0.0 if self.padded else padding,
            padding_ratio=padding if self.padded else 0.0,
            seconds=note.seconds,
            waiting_seconds=note.waiting_seconds,
            tokens_per_second=tokens / note.seconds,
            samples_per_second=count / note.seconds,
            noises_per_second=noises / note.seconds,
            utilisation=self.flops(tokens, note.pairs) / note.seconds / self.peak if self.peak else None,
            peak_memory_gib=note.peak_memory_gib,
        )


def _padding(note: StepNote) -> float:
    """The share of padding that the step's micro-batches would have, padded to their longest sample."""
    lengths = iter(note.lengths)
    batches = [[next(lengths) for _ in batch] for rank in note.step.planned.ranks for batch in rank if batch]
    return padding_ratio(*batches)
