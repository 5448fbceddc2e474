from __future__ import annotations

import math

import pytest
import torch

from qflux.config import EmaSettings, OptimizerSettings, TrainSettings
from qflux.errors import ConfigError
from qflux.training.distributed import World
from qflux.training.optimizer.build import build_optimizer
from qflux.training.optimizer.ema import Ema
from qflux.training.optimizer.loss_scale import LossScale
from qflux.training.optimizer.schedule import Schedule, build_schedule
from qflux.training.optimizer.step import Update, settle_gradients

RATE = 0.1


def make(optimizer: str = "AdamW", stop: bool = True, ema: bool = False, scaled: bool = False, **options) -> Update:
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(4, 3)) for name in "ab"}
    built = build_optimizer(
        OptimizerSettings(class_path=f"torch.optim.{optimizer}", init_args={"lr": RATE, **options}),
        parameters,
    )
    return Update(
        parameters,
        built,
        build_schedule(TrainSettings(), built, 10),
        World(),
        max_norm=1.0,
        stop_when_broken=stop,
        ema=Ema(EmaSettings(decay=0.9, warmup=False), parameters) if ema else None,
        loss_scale=LossScale(torch.device("cpu")) if scaled else None,
    )


def loss_of(update: Update, factor: float = 1.0) -> torch.Tensor:
    return sum(parameter.square().sum() for parameter in update.parameters.values()) * factor


def values(update: Update) -> list[torch.Tensor]:
    state = [t for held in update.optimizer.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    average = list(update.ema.average.values()) if update.ema else []
    return [t.detach().clone() for t in (*update.parameters.values(), *state, *average)]


def step(update: Update, number: int, factor: float = 1.0):
    loss = loss_of(update, factor)
    update.backward(loss)
    return update.apply(number, loss.detach())


@pytest.mark.parametrize("optimizer", [("AdamW", {}), ("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9})], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_no_number_changes_nothing_and_the_next_one_goes_on(optimizer, bad):
    name, options = optimizer
    update, undisturbed = (make(name, stop=False, ema=True, **options) for _ in range(2))
    for one in (update, undisturbed):
        step(one, 0)
    before = values(update)
    taken = step(update, 1, bad)
    assert (float(taken.skipped), float(taken.broken)) == (1.0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, values(update), strict=True))
    for one in (update, undisturbed):
        assert float(step(one, 1).skipped) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(values(update), values(undisturbed), strict=True))


def test_once_broken_nothing_changes_any_more_if_the_run_is_to_stop():
    """On a GPU the host learns of it a step later; what it then saves must be the state before the broken step."""
    update = make(stop=True, ema=True, fused=True)
    step(update, 0)
    before = values(update)
    step(update, 1, math.nan)
    taken = step(update, 2)
    assert (float(taken.skipped), float(taken.broken)) == (1.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, values(update), strict=True))


def test_clipping_is_torchs():
    update = make("SGD")
    expected = {name: parameter.detach().clone().requires_grad_() for name, parameter in update.parameters.items()}
    sum(p.square().sum() for p in expected.values()).backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.values(), 1.0)
    taken = step(update, 0)
    assert torch.allclose(taken.grad_norm, norm)
    for name, parameter in update.parameters.items():
        assert torch.allclose(parameter, expected[name] - RATE * expected[name].grad)


def test_the_average_is_the_one_by_hand_and_swapping_twice_restores():
    update = make("SGD", ema=True)
    average = update.parameters["a"].detach().clone()
    for number in range(4):
        step(update, number)
        average = 0.9 * average + 0.1 * update.parameters["a"].detach()
    assert torch.allclose(update.ema.average["a"], average)
    before = values(update)
    update.ema.swap()
    assert torch.allclose(update.parameters["a"], average)
    update.ema.swap()
    assert all(torch.equal(a, b) for a, b in zip(before, values(update), strict=True))


def test_the_loss_scale_halves_on_overflow_without_calling_it_broken_and_doubles_after_a_while():
    update = make("SGD", scaled=True)
    start = float(update.loss_scale.scale)
    for parameter in update.parameters.values():
        parameter.grad = torch.full_like(parameter, math.inf)
    taken = update.apply(0, torch.tensor(1.0))
    assert (float(taken.skipped), float(taken.broken)) == (1.0, 0.0)
    assert float(update.loss_scale.scale) == start / 2
    update.loss_scale.good_steps.fill_(LossScale.GROWTH_INTERVAL - 1)
    step(update, 1)
    assert float(update.loss_scale.scale) == start


def test_scaling_the_loss_does_not_change_the_step():
    plain, scaled = make("SGD"), make("SGD", scaled=True)
    norms = [step(update, 0).grad_norm for update in (plain, scaled)]
    assert torch.allclose(*norms)
    assert all(torch.allclose(a, b) for a, b in zip(values(plain), values(scaled), strict=True))


def closed_form(name: str, number: int, warmup: int, total: int, cycles: int, power: float) -> float:
    """Written down from what each schedule is meant to be."""
    if number < warmup and "constant" not in (name, name.removeprefix("piecewise_")):
        return number / warmup
    progress = (number - warmup) / (total - warmup)
    return {
        "constant": lambda: 1.0,
        "constant_with_warmup": lambda: 1.0,
        "piecewise_constant": lambda: 1.0 if number < 3 else 0.5 if number < 8 else 0.1,
        "linear": lambda: 1 - progress,
        "cosine": lambda: 0.5 * (1 + math.cos(math.pi * progress)),
        "cosine_with_restarts": lambda: 0.5 * (1 + math.cos(math.pi * (progress * cycles % 1))),
        "polynomial": lambda: (1 - progress) ** power * (1 - 1e-7 / RATE) + 1e-7 / RATE,
    }[name]()


SCHEDULES = {
    "constant": {},
    "constant_with_warmup": {"lr_warmup_steps": 4},
    "linear": {"lr_warmup_steps": 4},
    "cosine": {"lr_warmup_steps": 4},
    "cosine_with_restarts": {"lr_warmup_steps": 4, "lr_num_cycles": 3},
    "polynomial": {"lr_warmup_steps": 4, "lr_power": 2.0},
    "piecewise_constant": {"lr_step_rules": "1:3,0.5:8,0.1"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_of_every_step_is_the_schedules_closed_form(name):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    settings = TrainSettings(lr_scheduler=name, **SCHEDULES[name])
    schedule = build_schedule(settings, optimizer, 20)
    for number in range(20):
        schedule.set(optimizer, number)
        expected = RATE * closed_form(name, number, 4, 20, settings.lr_num_cycles, settings.lr_power)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, abs=1e-12), number


def test_parameter_groups_keep_their_own_rates():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.1}])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    Schedule(lambda number: 0.5).set(optimizer, 3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]


@pytest.mark.parametrize("rules", ["1:3,x", "1", ":", "1:2:3,4", "a:b,0.1"])
def test_rules_that_are_none_are_a_config_error(rules):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    settings = TrainSettings(lr_scheduler="piecewise_constant", lr_step_rules=rules)
    if rules == "1":  # one value for ever is a schedule
        assert build_schedule(settings, optimizer, 5).factor(3) == 1.0
        return
    with pytest.raises(ConfigError, match=r"train\.lr_scheduler"):
        build_schedule(settings, optimizer, 5)


@pytest.mark.parametrize("scaled", [False, True])
def test_fused_sgd_whose_very_first_step_is_left_out_starts_well_afterwards(scaled):
    """torch leaves its momentum unset in that case."""
    update, plain = (make("SGD", stop=False, scaled=scaled, momentum=0.9, fused=fused) for fused in (True, False))
    for one in (update, plain):
        for number in range(4):
            step(one, number, math.nan if number == 0 else 1.0)
    assert all(torch.allclose(a, b) for a, b in zip(update.parameters.values(), plain.parameters.values(), strict=True))


def test_a_gradient_that_overflows_at_the_smallest_scale_is_broken_and_the_scale_never_vanishes():
    update = make("SGD", scaled=True, stop=False)
    found = []
    for number in range(40):
        for parameter in update.parameters.values():
            parameter.grad = torch.full_like(parameter, math.nan)
        found.append(float(update.apply(number, torch.tensor(1.0)).broken))
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0.0, 1.0)
    assert float(update.loss_scale.scale) == LossScale.LEAST
    assert float(step(update, 41).skipped) == 0.0


def test_gradients_lie_where_they_lay_and_steps_are_the_same():
    settled, plain = make(), make()
    settle_gradients(settled.parameters.values())
    places = []
    for number in range(4):
        for update in (settled, plain):
            for _ in range(1 + number % 2):  # some steps have two passes
                update.backward(loss_of(update))
            if update is settled:
                places.append([parameter.grad.data_ptr() for parameter in update.parameters.values()])
            update.apply(number, loss_of(update).detach())
        assert all(parameter.grad is None for parameter in settled.parameters.values())
    assert places == places[:1] * 4
    assert all(torch.equal(one, other) for one, other in zip(values(settled), values(plain), strict=True))


def test_a_parameter_without_a_gradient_has_none_even_if_it_had_one_before():
    update = make()
    settle_gradients(update.parameters.values())
    step(update, 0)
    update.backward(update.parameters["a"].sum())
    assert update.parameters["b"].grad is None
