"""A step in passes: all samples, in order, none too large, no more passes than it takes, the same number for all."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from qflux.data.cut import evenly, in_order, recut
from qflux.data.plan import PlannedStep, Visit

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=9)


def best_cut(sizes: list[int], parts: int) -> int:
    """By trying all of them: the smallest that the largest part can be."""
    places = range(1, len(sizes))
    cuts = ((0, *chosen, len(sizes)) for chosen in combinations(places, parts - 1))
    return min(max(sum(sizes[a:b]) for a, b in pairwise(cut)) for cut in cuts)


def parted(sizes: list[int], counts: list[int]) -> list[list[int]]:
    items = iter(sizes)
    return [[next(items) for _ in range(count)] for count in counts]


@given(SIZES, st.integers(1, 80))
def test_the_fewest_parts_that_fit(sizes, most):
    parts = parted(sizes, in_order(sizes, most))
    assert list(chain(*parts)) == sizes
    assert all(sum(part) <= most or len(part) == 1 for part in parts)
    if max(sizes) <= most and len(parts) > 1:
        assert best_cut(sizes, len(parts) - 1) > most


@given(SIZES, st.integers(1, 9))
def test_parts_are_as_even_as_can_be(sizes, count):
    parts = parted(sizes, evenly(sizes, count))
    assert list(chain(*parts)) == sizes
    assert len(parts) == count
    assert all(parts[: min(count, len(sizes))]), "an empty part before the samples are used up"
    if count <= len(sizes):
        assert max(map(sum, parts)) == best_cut(sizes, count)


@given(st.lists(st.lists(st.integers(1, 40), max_size=7), min_size=1, max_size=3), st.integers(1, 80), st.data())
def test_every_rank_has_its_samples_in_order_and_as_many_passes_as_the_others(ranks, most, data):
    tokens = [size for rank in ranks for size in rank]
    numbers = iter(range(len(tokens)))
    visits = [[Visit(next(numbers), 0) for _ in rank] for rank in ranks]
    cuts = [evenly(rank, data.draw(st.integers(1, 4))) for rank in ranks]
    planned = PlannedStep(
        0, 0, tuple(tuple(map(tuple, parted(own, cut))) for own, cut in zip(visits, cuts, strict=True))
    )
    step = recut(planned, tokens, most)
    assert step.visits == planned.visits
    assert len({len(rank) for rank in step.ranks}) == 1
    for rank in step.ranks:
        for batch in rank:
            assert sum(tokens[visit.sample] for visit in batch) <= most or len(batch) == 1
    fewest = max(1, *(len(in_order(own, most)) for own in ranks))
    assert len(step.ranks[0]) == fewest
