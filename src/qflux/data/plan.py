"""Which samples train in which step on which rank, from the seed alone.

1. `_visits`     how often each sample is due in this epoch: its rate, spread evenly over epochs
2. `_shuffled`   the visits in an order drawn from (seed, epoch)
3. `_by_count`   steps of `batch_size` samples a micro-batch: the order, cut into pieces
   `_by_tokens`  or micro-batches of at most `max_tokens` tokens, and steps of micro-batches that cost alike
4. `_deal`       the micro-batches of a step to ranks: the same number each, of nearly the same cost

Every process computes the same plan. It knows every sample's token count before anything is loaded, so the number of
steps, the schedule and the loss denominator of every step are facts, not estimates. An epoch can be entered at any
step, and no epoch depends on the ones before.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qflux.config import Config
from qflux.errors import DataError
from qflux.files.hashing import seed_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ATTENTION_TOKENS = 6 * 3072
"""A sample of this many tokens spends as much on attention as on everything else, in a transformer 3072 wide; a family
says its own (`Facts.attention_tokens`)."""

WINDOW_STEPS = 32
"""How many steps' worth of samples are packed into micro-batches at once."""


@dataclass(frozen=True)
class Batching:
    """How visits become steps: by samples or by tokens, on how many ranks, accumulated how often."""

    batch_size: int | None = 1
    """Samples in a micro-batch."""
    max_tokens: int | None = None
    """Tokens in a micro-batch; instead of `batch_size`."""
    accumulation: int = 1
    """Micro-batches of one rank in an optimizer step."""
    world_size: int = 1
    attention_tokens: int = ATTENTION_TOKENS
    """Samples of more tokens spend more on attention than on everything else."""

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.max_tokens is None):
            raise ValueError("a micro-batch is measured either in samples or in tokens: give one of them")

    @classmethod
    def of(cls, config: Config, world_size: int = 1, attention_tokens: int = ATTENTION_TOKENS) -> Batching:
        """What a config asks for."""
        budget = config.data.max_tokens
        size = None if budget else config.data.batch_size or 1
        return cls(size, budget, config.train.gradient_accumulation_steps, world_size, attention_tokens)

    @property
    def slots(self) -> int:
        """Micro-batches of a full step, all ranks."""
        return self.accumulation * self.world_size


@dataclass(frozen=True)
class Visit:
    """A sample due to train for the `number + 1`th time in the run."""

    sample: int
    number: int


MicroBatch = tuple[Visit, ...]


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step: for every rank the same number of micro-batches.

    In the last step of an epoch there may be fewer samples than micro-batches; some are empty then.
    """

    epoch: int
    within: int
    """Steps of this epoch before it."""
    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def visits(self) -> list[Visit]:
        """Of all ranks."""
        return [visit for rank in self.ranks for batch in rank for visit in batch]

    @property
    def samples(self) -> int:
        return len(self.visits)


class EpochPlan:
    """One epoch: every sample as often as its rate says, in an order drawn from (seed, epoch).

    Args:
        tokens: of each sample, text and images together.
        batching: how visits become steps.
        seed: of the order.
        epoch: which one, from 0.
        rates: visits of each sample per epoch; 1 by default. A rate of 0.25 means once in four epochs, and then
            a quarter of such samples is due in each of them.
    """

    def __init__(
        self,
        tokens: Sequence[int] | Ints,
        batching: Batching,
        seed: int = 0,
        epoch: int = 0,
        rates: Sequence[float] | Floats | None = None,
    ) -> None:
        self.epoch = epoch
        self.batching = batching
        random = np.random.PCG64(seed_of("epoch", seed, epoch))
        due, numbers = _visits(_rates(rates, len(tokens)), epoch)
        order = _shuffled(len(due), random)
        self._samples, self._numbers = due[order], numbers[order]
        lengths = np.asarray(tokens, dtype=np.int64)[self._samples]
        self._lengths = lengths
        self._costs = cost_of(lengths, batching.attention_tokens)
        self._bins: list[list[list[int]]] | None = None
        """By tokens: the micro-batches of each step, as positions in the order."""
        if batching.max_tokens is not None:
            self._bins = _by_tokens(lengths, self._costs, batching, random)

    def __len__(self) -> int:
        """Optimizer steps."""
        if self._bins is not None:
            return len(self._bins)
        return math.ceil(len(self._samples) / self._per_step)

    def __getitem__(self, within: int) -> PlannedStep:
        if not 0 <= within < len(self):
            raise IndexError(f"step {within} of an epoch of {len(self)}")
        ranks = _deal(self._micro_batches(within), self._costs, self.batching.world_size)
        return PlannedStep(
            self.epoch, within, tuple(tuple(tuple(map(self._visit, batch)) for batch in rank) for rank in ranks)
        )

    def __iter__(self) -> Iterator[PlannedStep]:
        return self.steps()

    def steps(self, start: int = 0) -> Iterator[PlannedStep]:
        """The steps from `start` on."""
        return (self[within] for within in range(start, len(self)))

    def largest(self, start: int = 0, stop: int | None = None) -> tuple[int, MicroBatch]:
        """The micro-batch of the most tokens in steps `start` to `stop`, and how many they are."""
        stop = len(self) if stop is None else min(stop, len(self))
        best: tuple[int, MicroBatch] = 0, ()
        # No micro-batch has more than the longest samples of its step; most steps need no closer look.
        bounds = [(self._bound(within), within) for within in range(start, stop)]
        for bound, within in sorted(bounds, key=lambda item: (-item[0], item[1])):
            if bound <= best[0]:
                break
            for batch in self._micro_batches(within):
                tokens = int(self._lengths[batch].sum())
                if tokens > best[0]:
                    best = tokens, tuple(map(self._visit, batch))
        return best

    def _bound(self, within: int) -> int:
        """At most so many tokens are in a micro-batch of a step."""
        if self._bins is not None:
            return max(int(self._lengths[batch].sum()) for batch in self._bins[within])
        step = self._lengths[within * self._per_step : (within + 1) * self._per_step]
        return int(np.sort(step)[-(self.batching.batch_size or 1) :].sum())

    def _micro_batches(self, within: int) -> list[list[int]]:
        return _by_count(within, self._costs, self.batching) if self._bins is None else self._bins[within]

    @property
    def _per_step(self) -> int:
        return (self.batching.batch_size or 1) * self.batching.slots

    def _visit(self, position: int) -> Visit:
        return Visit(int(self._samples[position]), int(self._numbers[position]))


class TrainingPlan:
    """All epochs of a run, as one sequence of optimizer steps counted from 0.

    `starts` is the first step of each epoch known so far. It is saved with a checkpoint: with a token budget only the
    plan of an epoch tells how many steps it has, and a resumed run should not have to make the plans of the past.
    """

    def __init__(
        self,
        tokens: Sequence[int] | Ints,
        batching: Batching,
        seed: int = 0,
        rates: Sequence[float] | Floats | None = None,
    ) -> None:
        if not len(tokens):
            raise DataError("there is no sample to train on", "`qflux inspect` shows what is wrong with the data.")
        self._arguments: dict[str, Any] = {"tokens": tokens, "batching": batching, "seed": seed, "rates": rates}
        self.starts = [0]
        self._epochs: dict[int, EpochPlan] = {}

    @property
    def tokens(self) -> Sequence[int] | Ints:
        """Of each sample."""
        tokens: Sequence[int] | Ints = self._arguments["tokens"]
        return tokens

    def epoch(self, number: int) -> EpochPlan:
        if number not in self._epochs:
            # Two are kept: reading ahead is already in the next epoch while training ends this one.
            self._epochs = {n: plan for n, plan in self._epochs.items() if n in (number - 1, number + 1)}
            self._epochs[number] = EpochPlan(epoch=number, **self._arguments)
        return self._epochs[number]

    def total_steps(self, max_train_steps: int | None, num_epochs: int) -> int:
        return max_train_steps if max_train_steps is not None else self.first_step(num_epochs)

    def first_step(self, epoch: int) -> int:
        """Steps before `epoch`."""
        while len(self.starts) <= epoch:
            self.starts.append(self.starts[-1] + len(self.epoch(len(self.starts) - 1)))
        return self.starts[epoch]

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the number of steps of that epoch before it."""
        epoch = 0
        while self.first_step(epoch + 1) <= step:
            epoch += 1
        return epoch, step - self.first_step(epoch)

    def steps(self, start: int, stop: int) -> Iterator[tuple[int, PlannedStep]]:
        """Steps `start` to `stop`, each with its number."""
        if start >= stop:
            return
        epoch, within = self.locate(start)
        number = start
        while number < stop:
            for step in self.epoch(epoch).steps(within):
                if number == stop:
                    return
                yield number, step
                number += 1
            epoch, within = epoch + 1, 0

    def largest(self, start: int, stop: int, epochs: int = 20) -> tuple[int, MicroBatch]:
        """The micro-batch of the most tokens in steps `start` to `stop`, and how many they are.

        At most so many epochs are looked at; with a token budget one, since every epoch fills it.
        """
        best: tuple[int, MicroBatch] = 0, ()
        if start >= stop:
            return best
        (first, within), (last, _) = self.locate(start), self.locate(stop - 1)
        epochs = 1 if self._arguments["batching"].max_tokens is not None else epochs
        for number in range(first, min(last + 1, first + epochs)):
            begin = self.first_step(number)
            found = self.epoch(number).largest(within if number == first else 0, stop - begin)
            best = max(best, found, key=lambda item: item[0])
        return best


def cost_of(tokens: Ints, attention_tokens: int = ATTENTION_TOKENS) -> Floats:
    """What samples of these lengths cost, in tokens of linear layers."""
    return tokens * (1.0 + tokens / attention_tokens)


def _rates(rates: Sequence[float] | Floats | None, count: int) -> Floats:
    return np.ones(count) if rates is None else np.asarray(rates, dtype=np.float64)


def _visits(rates: Floats, epoch: int) -> tuple[Ints, Ints]:
    """The samples due in an epoch, and for each how many visits it had before.

    Before epoch e a sample of rate r has had floor(e r + phase) visits. Phases are spread evenly over the samples of
    one rate, so that such samples take turns, and any number of whole rates comes out exactly.
    """
    phases = np.zeros(len(rates))
    for rate in np.unique(rates):
        members = np.flatnonzero(rates == rate)
        phases[members] = np.arange(len(members)) / len(members)
    before, after = (np.floor(e * rates + phases + 1e-9).astype(np.int64) for e in (epoch, epoch + 1))
    counts = after - before
    samples = np.repeat(np.arange(len(rates)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return samples, np.repeat(before, counts) + np.arange(len(samples)) - first


def _shuffled(count: int, random: np.random.PCG64) -> Ints:
    """A permutation. numpy promises that raw bits stay the same from version to version; of `shuffle` it does not."""
    return np.argsort(random.random_raw(count), kind="stable")


def _by_count(within: int, costs: Floats, batching: Batching) -> list[list[int]]:
    """Micro-batches of one step: its piece of the order, the costliest samples apart from each other."""
    size = batching.batch_size or 1
    start = within * size * batching.slots
    positions = range(start, min(start + size * batching.slots, len(costs)))
    rounds = -(-len(positions) // (size * batching.world_size))
    bins: list[list[int]] = [[] for _ in range(rounds * batching.world_size)]
    loads = [(0.0, number) for number in range(len(bins))]
    for position in sorted(positions, key=lambda p: (-costs[p], p)):
        load, number = heapq.heappop(loads)
        bins[number].append(position)
        if len(bins[number]) < size:
            heapq.heappush(loads, (load + costs[position], number))
    return bins


def _by_tokens(tokens: Ints, costs: Floats, batching: Batching, random: np.random.PCG64) -> list[list[list[int]]]:
    """The micro-batches of every step, by token budget.

    A window of the order is packed into micro-batches; those that cost alike become a step, so that no rank waits long
    for another; then the steps of the window are shuffled. What does not fill a step goes on to the next window.
    """
    budget, slots = batching.max_tokens or 0, batching.slots
    if len(tokens) and tokens.max() > budget:
        raise DataError(
            f"a sample of {tokens.max()} tokens is larger than max_tokens {budget}", "raise data.max_tokens."
        )
    mean = tokens.mean() if len(tokens) else 1.0
    window = max(1, round(WINDOW_STEPS * slots * budget / mean))
    steps: list[list[list[int]]] = []
    waiting: list[int] = []
    rest: list[list[int]] = []
    for start in range(0, len(tokens), window):
        members = np.array([*waiting, *range(start, min(start + window, len(tokens)))])
        bins = _packed(members, tokens, budget, random)
        bins.sort(key=lambda batch: sum(costs[position] for position in batch))
        full = len(bins) // slots
        # The remainder is taken from the cheap end or the dear end in turn, else it would be of one kind for ever.
        skip = len(bins) % slots if len(steps) % 2 else 0
        groups = [bins[skip + slots * i : skip + slots * (i + 1)] for i in range(full)]
        rest = bins[:skip] if skip else bins[slots * full :]
        steps += [groups[i] for i in _shuffled(full, random)]
        waiting = [position for batch in rest for position in batch]
    if rest:
        steps.append(_split_to_fill(rest, costs, batching.world_size))
    return steps


def _packed(members: Ints, tokens: Ints, budget: int, random: np.random.PCG64) -> list[list[int]]:
    """Micro-batches within the budget: large samples first, each where it fits most tightly.

    "Large" is blurred at random, or a small data set would be packed the same way in every epoch.
    """
    blur = 0.75 + 0.5 * (random.random_raw(len(members)) >> np.uint64(11)) / 2.0**53
    order = members[np.argsort(-tokens[members] * blur, kind="stable")]
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for position, size in zip(order.tolist(), tokens[order].tolist(), strict=True):
        fit = bisect_left(room, (size, 0))
        if fit == len(room):
            left, number = budget, len(bins)
            bins.append([])
        else:
            left, number = room.pop(fit)
        bins[number].append(position)
        insort(room, (left - size, number))
    return bins


def _split_to_fill(bins: list[list[int]], costs: Floats, world_size: int) -> list[list[int]]:
    """Split the dearest micro-batches until every rank has as many as the others; then add empty ones."""
    wanted = math.ceil(len(bins) / world_size) * world_size
    bins = list(bins)
    while len(bins) < wanted:
        splittable = [batch for batch in bins if len(batch) > 1]
        if not splittable:
            return bins + [[] for _ in range(wanted - len(bins))]
        dearest = max(splittable, key=lambda batch: float(costs[batch].sum()))
        bins.remove(dearest)
        halves: list[list[int]] = [[], []]
        for position in sorted(dearest, key=lambda p: (-costs[p], p)):
            min(halves, key=lambda half: float(costs[half].sum())).append(position)
        bins += halves
    return bins


def _deal(bins: list[list[int]], costs: Floats, world_size: int) -> list[list[list[int]]]:
    """Micro-batches to ranks: in every round micro-batches of like cost, the dearest to who has had the least."""
    loads = [0.0] * world_size
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    priced = sorted(((float(costs[batch].sum()), batch) for batch in bins), key=lambda item: (-item[0], item[1]))
    for start in range(0, len(priced), world_size):
        by_load = sorted(range(world_size), key=lambda rank: (loads[rank], rank))
        for rank, (cost, batch) in zip(by_load, priced[start : start + world_size], strict=True):
            ranks[rank].append(batch)
            loads[rank] += cost
    return ranks
