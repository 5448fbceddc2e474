from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from qflux.data import EpochPlan


@given(count=st.integers(1, 40), batch_size=st.integers(1, 6), accumulation=st.integers(1, 4), seed=st.integers(0, 5))
def test_every_sample_trains_once_per_epoch_with_its_tokens_counted(count, batch_size, accumulation, seed):
    tokens = [10 + 3 * i for i in range(count)]
    plan = EpochPlan(tokens, batch_size, accumulation, seed)
    for epoch in range(2):
        steps = [plan.step(epoch * plan.steps_per_epoch + i) for i in range(plan.steps_per_epoch)]
        seen = Counter(index for step in steps for batch in step.micro_batches for index in batch)
        assert seen == Counter(range(count))
        for step in steps:
            assert step.epoch == epoch
            assert step.target_tokens == sum(tokens[i] for batch in step.micro_batches for i in batch)
            assert all(0 < len(batch) <= batch_size for batch in step.micro_batches)
            assert step.samples <= batch_size * accumulation
        assert all(step.samples == batch_size * accumulation for step in steps[:-1])


def test_a_step_is_the_same_however_it_is_reached():
    plan, fresh = EpochPlan([1] * 10, 3, 1, 7), EpochPlan([1] * 10, 3, 1, 7)
    walked = list(plan.steps(0, 9))
    assert fresh.step(8) == walked[8]
    assert [step.micro_batches for step in walked[:4]] != [step.micro_batches for step in walked[4:8]]


def test_accumulation_regroups_the_same_samples():
    whole, split = EpochPlan([1] * 12, 4, 1, 3), EpochPlan([1] * 12, 1, 4, 3)
    for number in range(3):
        first, second = whole.step(number), split.step(number)
        assert [i for b in first.micro_batches for i in b] == [i for b in second.micro_batches for i in b]


def test_max_train_steps_wins_over_epochs():
    plan = EpochPlan([1] * 10, 4)
    assert plan.steps_per_epoch == 3
    assert plan.total_steps(None, 2) == 6
    assert plan.total_steps(5, 2) == 5
