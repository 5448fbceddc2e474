"""Items in the order they are given, as many to a batch as fit."""

from __future__ import annotations

from collections.abc import Sequence


def fitting(lengths: Sequence[int], budget: int, most: int | None = None) -> list[list[int]]:
    """The places of items in batches of at most `budget` tokens and `most` items; a longer item is alone.

    The same batches for the same list, whatever is done with them.
    """
    batches: list[list[int]] = []
    room = 0
    for place, tokens in enumerate(lengths):
        if tokens > room or not batches or len(batches[-1]) == most:
            batches.append([])
            room = budget
        batches[-1].append(place)
        room -= tokens
    return batches
