"""How an optimizer step is cut into passes: a matter of memory and speed, never of the result.

A sample's part in a step does not depend on its batch-mates, so the samples of a rank may be run together or apart.
They stay in their order, whatever the cut: what is known of them is collected in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from qflux.data.plan import MicroBatch, PlannedStep


def recut(step: PlannedStep, tokens: Sequence[int], most: int) -> PlannedStep:
    """The same samples of every rank in as few passes of at most `most` tokens as it takes, of like size.

    `tokens` are those of each sample. A sample that is larger is alone. All ranks have the same number of passes: a
    sharded model needs them all in every one. Where a rank has fewer samples than that, it has empty ones.
    """
    ranks = [tuple(visit for batch in rank for visit in batch) for rank in step.ranks]
    sizes = [[tokens[visit.sample] for visit in visits] for visits in ranks]
    count = max(1, *(len(in_order(own, most)) for own in sizes))
    return replace(step, ranks=tuple(_parted(*each, count, most) for each in zip(ranks, sizes, strict=True)))


def in_order(sizes: Sequence[int], most: int) -> list[int]:
    """How many items of these sizes go into each of the fewest parts of at most `most`; a larger item is alone."""
    counts: list[int] = []
    room = 0
    for size in sizes:
        if size > room or not counts:
            counts.append(0)
            room = most
        counts[-1] += 1
        room -= size
    return counts


def evenly(sizes: Sequence[int], parts: int, most: int | None = None) -> list[int]:
    """How many items go into each of so many parts, so that the largest part is as small as can be.

    With `most`, for which there have to be enough parts, an item that is larger is alone.
    """
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:  # the least size of a part with which there are not too many of them
        middle = (low + high) // 2
        if len(in_order(sizes, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    counts = in_order(sizes, low if most is None else min(low, most))
    while len(counts) < min(parts, len(sizes)):
        counts = _split_one(sizes, counts)
    return counts + [0] * (parts - len(counts))


def _split_one(sizes: Sequence[int], counts: list[int]) -> list[int]:
    """The largest part that has several items, in two."""
    ends = list(accumulate(counts))
    parts = [list(sizes[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    place = max((place for place, part in enumerate(parts) if len(part) > 1), key=lambda place: sum(parts[place]))
    part = parts[place]
    first = min(range(1, len(part)), key=lambda cut: abs(sum(part[:cut]) - sum(part[cut:])))
    return [*counts[:place], first, len(part) - first, *counts[place + 1 :]]


def _parted(visits: MicroBatch, sizes: Sequence[int], parts: int, most: int) -> tuple[MicroBatch, ...]:
    passes, start = [], 0
    for count in evenly(sizes, parts, most):
        passes.append(visits[start : start + count])
        start += count
    return tuple(passes)
