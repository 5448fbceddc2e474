"""Which samples train in which step, from the seed alone.

The plan knows every sample's token count before anything is loaded, so the number of steps, the schedule and the loss
denominator of every step are facts, not estimates. It can be entered at any step without replaying the ones before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from qflux.data.store import key_of


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step: micro-batches of sample indices, each visited for the `epoch + 1`th time."""

    number: int
    epoch: int
    micro_batches: tuple[tuple[int, ...], ...]
    target_tokens: int
    """Over all micro-batches of the step."""

    @property
    def samples(self) -> int:
        return sum(len(batch) for batch in self.micro_batches)


class EpochPlan:
    """Every sample once per epoch, in an order drawn from (seed, epoch).

    Args:
        target_tokens: of each sample.
        batch_size: samples in a micro-batch.
        accumulation: micro-batches in an optimizer step. The last step of an epoch may be smaller; it is neither
            dropped nor topped up.
        seed: of the order.
    """

    def __init__(self, target_tokens: Sequence[int], batch_size: int, accumulation: int = 1, seed: int = 0) -> None:
        self._tokens = tuple(target_tokens)
        self._batch_size = batch_size
        self._per_step = batch_size * accumulation
        self._seed = seed
        self.steps_per_epoch = -(-len(self._tokens) // self._per_step)

    def total_steps(self, max_train_steps: int | None, num_epochs: int) -> int:
        return max_train_steps if max_train_steps is not None else num_epochs * self.steps_per_epoch

    def step(self, number: int) -> PlannedStep:
        """Step `number`, counted from 0 over all epochs."""
        epoch, within = divmod(number, self.steps_per_epoch)
        samples = self._order(epoch)[within * self._per_step : (within + 1) * self._per_step]
        return PlannedStep(
            number=number,
            epoch=epoch,
            micro_batches=tuple(
                samples[start : start + self._batch_size] for start in range(0, len(samples), self._batch_size)
            ),
            target_tokens=sum(self._tokens[index] for index in samples),
        )

    def steps(self, start: int, stop: int) -> Iterator[PlannedStep]:
        return (self.step(number) for number in range(start, stop))

    def _order(self, epoch: int) -> tuple[int, ...]:
        return _shuffled(len(self._tokens), key_of("epoch", self._seed, epoch))


@lru_cache(maxsize=4)
def _shuffled(count: int, key: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(key).shuffle(order)
    return tuple(order)
