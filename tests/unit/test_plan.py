from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qflux.data import EpochPlan
from qflux.data.plan import Batching, PlannedStep, TrainingPlan, cost_of
from qflux.errors import DataError

worlds = st.integers(1, 64)
token_lists = st.lists(st.integers(1, 900), min_size=1, max_size=120)


@st.composite
def batchings(draw) -> Batching:
    by_tokens = draw(st.booleans())
    return Batching(
        batch_size=None if by_tokens else draw(st.integers(1, 5)),
        max_tokens=draw(st.integers(900, 4000)) if by_tokens else None,
        accumulation=draw(st.integers(1, 5)),
        world_size=draw(worlds),
    )


def seen(steps: list[PlannedStep]) -> Counter:
    return Counter(visit.sample for step in steps for visit in step.visits)


@settings(max_examples=200, deadline=None)
@given(tokens=token_lists, batching=batchings(), seed=st.integers(0, 9), epoch=st.integers(0, 50))
def test_every_sample_trains_once_per_epoch_on_any_number_of_ranks(tokens, batching, seed, epoch):
    steps = list(EpochPlan(tokens, batching, seed, epoch))
    assert seen(steps) == Counter(range(len(tokens)))
    assert all(visit.number == epoch for step in steps for visit in step.visits)


@settings(max_examples=200, deadline=None)
@given(tokens=token_lists, batching=batchings(), seed=st.integers(0, 9))
def test_every_rank_has_as_many_micro_batches_and_none_too_large(tokens, batching, seed):
    steps = list(EpochPlan(tokens, batching, seed))
    for number, step in enumerate(steps):
        assert len(step.ranks) == batching.world_size
        assert len({len(rank) for rank in step.ranks}) == 1
        assert 1 <= len(step.ranks[0]) <= batching.accumulation
        sizes = [[tokens[visit.sample] for visit in batch] for rank in step.ranks for batch in rank]
        if batching.max_tokens:
            assert all(sum(batch) <= batching.max_tokens for batch in sizes)
        else:
            assert all(len(batch) <= batching.batch_size for batch in sizes)
        if number < len(steps) - 1:
            assert len(step.ranks[0]) == batching.accumulation
            assert all(sizes), "only the end of an epoch may leave a rank without a sample"
        else:
            empty = sum(not batch for batch in sizes)
            assert empty == max(0, len(sizes) - step.samples)


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 200),
    shape=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]),
    size=st.integers(1, 3),
)
def test_with_equal_batches_a_step_trains_the_same_samples_whatever_the_world_size(count, shape, size):
    world, accumulation = shape
    tokens = [10 + 7 * i for i in range(count)]
    alone = EpochPlan(tokens, Batching(size, accumulation=12), seed=3, epoch=2)
    many = EpochPlan(tokens, Batching(size, accumulation=accumulation, world_size=world), seed=3, epoch=2)
    assert [Counter(step.visits) for step in alone] == [Counter(step.visits) for step in many]


@settings(max_examples=50, deadline=None)
@given(tokens=token_lists, world=worlds, size=st.integers(1, 4))
def test_the_union_over_ranks_follows_one_order_whatever_the_world_size(tokens, world, size):
    """A larger world takes larger pieces of the same order: a union of single steps."""
    single = [step.visits[0] for step in EpochPlan(tokens, Batching(1), seed=5)]
    per_step = world * size
    for step in EpochPlan(tokens, Batching(size, world_size=world), seed=5):
        piece = single[step.within * per_step : (step.within + 1) * per_step]
        assert Counter(step.visits) == Counter(piece)


@settings(max_examples=50, deadline=None)
@given(tokens=token_lists, batching=batchings(), data=st.data())
def test_a_plan_entered_at_any_step_gives_the_same_remainder(tokens, batching, data):
    rates = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=len(tokens), max_size=len(tokens)))
    whole = list(TrainingPlan(tokens, batching, 1, rates).steps(0, 12))
    start = data.draw(st.integers(0, 12))
    assert list(TrainingPlan(tokens, batching, 1, rates).steps(start, 12)) == whole[start:]
    assert [number for number, _ in whole] == list(range(12))


def test_a_resumed_plan_does_not_make_the_plans_of_the_past(monkeypatch):
    tokens, batching = [5] * 10, Batching(None, max_tokens=20)
    first = TrainingPlan(tokens, batching)
    expected = list(first.steps(40, 42))
    made = []
    original = EpochPlan.__init__
    monkeypatch.setattr(EpochPlan, "__init__", lambda self, *a, epoch, **k: (
        made.append(epoch), original(self, *a, epoch=epoch, **k)
    )[0])  # fmt: skip
    resumed = TrainingPlan(tokens, batching)
    resumed.starts = list(first.starts)
    assert list(resumed.steps(40, 42)) == expected
    assert set(made) == {expected[0][1].epoch}


@settings(max_examples=100, deadline=None)
@given(
    repeats=st.lists(st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 7.0]), min_size=1, max_size=40),
    epochs=st.integers(1, 20),
)
def test_a_sample_trains_exactly_as_often_as_its_rate_says(repeats, epochs):
    visits: dict[int, list[int]] = {i: [] for i in range(len(repeats))}
    for epoch in range(epochs):
        for step in EpochPlan([5] * len(repeats), Batching(3), 0, epoch, repeats):
            for visit in step.visits:
                visits[visit.sample].append(visit.number)
    for sample, numbers in visits.items():
        due = round(epochs * repeats[sample], 6)
        assert len(numbers) in (int(np.floor(due)), int(np.ceil(due)))
        assert sorted(numbers) == list(range(len(numbers))), "each visit has its own number, hence its own noise"


def test_samples_of_a_fractional_rate_take_turns():
    per_epoch = [seen(list(EpochPlan([5] * 8, Batching(1), 0, epoch, [0.25] * 8))) for epoch in range(4)]
    assert [sum(counter.values()) for counter in per_epoch] == [2, 2, 2, 2]
    assert sum(per_epoch, Counter()) == Counter(range(8))


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed: int, epoch: int) -> list[int]:
        return [step.visits[0].sample for step in EpochPlan([5] * 50, Batching(1), seed, epoch)]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # The order is part of what a checkpoint relies on: it must be the same with every version of every library.
    assert order(0, 0)[:8] == [23, 8, 22, 38, 11, 1, 15, 46]


def test_a_token_budget_is_used_well_and_ranks_are_balanced():
    random = np.random.default_rng(0)
    tokens = np.exp(random.normal(8.5, 0.6, 4000)).clip(800, 30000).astype(int)
    plan = EpochPlan(tokens, Batching(None, max_tokens=32768, world_size=8))
    steps = list(plan)[:-1]
    fill = np.mean([tokens[[v.sample for v in batch]].sum() for s in steps for rank in s.ranks for batch in rank])
    assert fill > 0.97 * 32768
    loads = np.array([[cost_of(tokens[[v.sample for v in rank[0]]]).sum() for rank in step.ranks] for step in steps])
    assert (loads.max(1) / loads.mean(1)).mean() < 1.03


def test_a_small_data_set_is_packed_anew_in_every_epoch():
    tokens = [100 + 37 * i for i in range(20)]
    packings = {
        frozenset(frozenset(visit.sample for visit in step.visits) for step in EpochPlan(
            tokens, Batching(None, max_tokens=2000), 0, epoch
        ))
        for epoch in range(6)
    }  # fmt: skip
    assert len(packings) == 6


def test_an_epoch_that_ends_with_fewer_samples_than_ranks_leaves_some_idle():
    (step,) = EpochPlan([5, 9, 7], Batching(4, world_size=8))
    assert sorted(len(rank[0]) for rank in step.ranks) == [0, 0, 0, 0, 0, 1, 1, 1]
    (step,) = EpochPlan([5, 9, 7], Batching(None, max_tokens=100, world_size=2))
    assert sorted(len(rank[0]) for rank in step.ranks) == [1, 2]


def test_a_sample_beyond_the_budget_is_refused():
    with pytest.raises(DataError, match="a sample of 30 tokens is larger than max_tokens 20"):
        EpochPlan([5, 30], Batching(None, max_tokens=20))


def test_a_micro_batch_is_measured_in_samples_or_in_tokens():
    with pytest.raises(ValueError, match="give one of them"):
        Batching(2, 100)


def test_max_train_steps_wins_over_epochs():
    plan = TrainingPlan([1] * 10, Batching(4))
    assert plan.total_steps(None, 2) == 6
    assert plan.total_steps(5, 2) == 5
    assert plan.locate(4) == (1, 1)


@settings(max_examples=60, deadline=None)
@given(
    tokens=token_lists, batching=batchings(), epoch=st.integers(0, 6), rate=st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])
)
def test_rates_hold_on_any_number_of_ranks(tokens, batching, epoch, rate):
    counts = seen(list(EpochPlan(tokens, batching, 0, epoch, [rate] * len(tokens))))
    alone = seen(list(EpochPlan(tokens, Batching(1), 0, epoch, [rate] * len(tokens))))
    assert counts == alone


def test_the_costliest_samples_of_a_step_go_to_different_ranks():
    random = np.random.default_rng(1)
    tokens = np.exp(random.normal(7.5, 0.9, 512)).astype(int)
    plan = EpochPlan(tokens, Batching(4, accumulation=2, world_size=8))

    def excess(step: PlannedStep, rounds: range) -> float:
        loads = [sum(cost_of(tokens[[v.sample for v in rank[i]]]).sum() for i in rounds) for rank in step.ranks]
        return max(loads) / (sum(loads) / len(loads)) - 1

    by_chance = np.array([cost_of(tokens[i : i + 64]).reshape(8, 8).sum(1) for i in range(0, 512, 64)])
    assert np.mean([excess(step, range(2)) for step in plan]) < 0.6 * (by_chance.max(1) / by_chance.mean(1) - 1).mean()
