from __future__ import annotations

import json

import pytest
import torch
from prodigyopt import Prodigy
from safetensors.torch import load_file
from torchao.optim import AdamW8bit

from qflux.config import EmaSettings, TrainSettings
from qflux.data.plan import Batching, TrainingPlan
from qflux.errors import CheckpointError
from qflux.training.checkpoint import FILES, Checkpoints, TrainingState, read_past
from qflux.training.distributed import World
from qflux.training.optimizer.ema import Ema
from qflux.training.optimizer.loss_scale import LossScale
from qflux.training.optimizer.schedule import build_schedule
from qflux.training.optimizer.step import Update
from qflux.training.resume_guard import known_starts


def fresh_state(optimizer=torch.optim.AdamW, ema: bool = False, scaled: bool = False, **options) -> TrainingState:
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(3, 2)) for name in ("b.weight", "a.weight")}
    built = optimizer(list(parameters.values()), lr=0.1, **options)
    update = Update(
        parameters,
        built,
        build_schedule(TrainSettings(lr_scheduler="cosine", lr_warmup_steps=2), built, 20),
        World(),
        max_norm=1.0,
        stop_when_broken=True,
        ema=Ema(EmaSettings(), parameters) if ema else None,
        loss_scale=LossScale(torch.device("cpu")) if scaled else None,
    )
    return TrainingState(update, TrainingPlan([1], Batching()))


def train(state: TrainingState, first: int, last: int) -> None:
    for number in range(first, last):
        loss = sum(parameter.square().sum() for parameter in state.update.parameters.values())
        state.update.backward(loss)
        state.update.apply(number, loss.detach())


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Prodigy": (Prodigy, {"use_bias_correction": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "torchao": (AdamW8bit, {"block_size": 2}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("extra", [{}, {"ema": True}, {"scaled": True}], ids=["plain", "ema", "float16"])
def test_a_loaded_state_continues_as_the_saved_one(tmp_path, optimizer, extra):
    kind, options = OPTIMIZERS[optimizer]
    checkpoints = Checkpoints(tmp_path, 2, {})
    state = fresh_state(kind, **options, **extra)
    train(state, 0, 5)
    checkpoints.save(5, state)
    other = fresh_state(kind, **options, **extra)
    assert checkpoints.resume(other) == 5
    train(state, 5, 10)
    train(other, 5, 10)
    first, second = (Checkpoints(tmp_path / name, 1, {}).save(10, s) for name, s in (("a", state), ("b", other)))
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert ("ema.safetensors" in {file.name for file in first.iterdir()}) == ("ema" in extra)


class HalfMomentum(torch.optim.SGD):
    """Keeps its state in half the bits of its parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.bfloat16))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(momentum.float(), alpha=-group["lr"])


def test_state_in_another_dtype_than_its_parameter_comes_back_in_its_own(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1, {})
    state, other = fresh_state(HalfMomentum), fresh_state(HalfMomentum)
    train(state, 0, 3)
    checkpoints.save(3, state)
    checkpoints.resume(other)
    train(state, 3, 6)
    train(other, 3, 6)
    for name, parameter in state.update.parameters.items():
        assert torch.equal(parameter, other.update.parameters[name])


def test_a_held_out_loss_that_is_nan_or_of_another_measure_is_no_competition(tmp_path):
    for step, (loss, measure) in enumerate([(0.1, "old"), (float("nan"), "new"), (0.7, "new"), (0.8, "new")]):
        checkpoints = Checkpoints(tmp_path, 9, {}, measure=measure)
        checkpoints.save(step, fresh_state(), loss)
    assert checkpoints.best() == (tmp_path / "step-00000002", 0.7)


def test_a_checkpoint_is_replaced_by_one_that_knows_its_held_out_loss_and_not_lost_on_the_way(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 2, {})
    checkpoints.save(1, fresh_state())
    checkpoints.save(1, fresh_state(), 0.5)
    assert checkpoints.held_out(1) == 0.5
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")  # killed between the two renames
    assert checkpoints.resume(fresh_state()) == 1


def test_the_newest_complete_checkpoint_is_taken_and_torn_ones_are_named(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, 5, {})
    state = fresh_state()
    for step in (1, 2, 3, 4):
        train(state, step - 1, step)
        checkpoints.save(step, state)
    (tmp_path / "step-00000004" / "parameters.safetensors").unlink()
    data = bytearray((tmp_path / "step-00000003" / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "step-00000003" / "optimizer.safetensors").write_bytes(data)
    assert checkpoints.resume(fresh_state()) == 2
    assert "step-00000004 is skipped" in caplog.text
    assert "step-00000003 is skipped: optimizer.safetensors" in caplog.text


def test_rotation_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2, {})
    (tmp_path / ".step-00000001.123.tmp").mkdir(parents=True)
    for step in (1, 2, 3):
        checkpoints.save(step, fresh_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_rotation_keeps_the_best_by_held_out_loss_too(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2, {})
    for step, loss in ((1, 0.9), (2, 0.4), (3, 0.5), (4, None), (5, 0.4), (6, 0.6)):
        checkpoints.save(step, fresh_state(), loss)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000005", "step-00000006"]
    assert checkpoints.best() == (tmp_path / "step-00000002", 0.4)


@pytest.mark.parametrize("name", [*sorted(FILES), "ema.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_any_file_torn_or_missing_makes_a_checkpoint_skipped_and_named(tmp_path, caplog, name, damage):
    checkpoints = Checkpoints(tmp_path, 2, {})
    for step in (1, 2):
        checkpoints.save(step, fresh_state(ema=True))
    file = tmp_path / "step-00000002" / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-1])
    if (name, damage) == ("manifest.json", "truncated"):
        file.write_bytes(file.read_bytes()[:-2])  # the last byte is a line end, which JSON does not need
    assert checkpoints.resume(fresh_state(ema=True)) == 1
    assert f"{tmp_path / 'step-00000002'} is skipped" in caplog.text


def test_if_no_checkpoint_is_complete_that_is_an_error_and_not_a_new_start(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2, {})
    for step in (1, 2):
        (checkpoints.save(step, fresh_state()) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete: step-00000002: .*; step-00000001: "):
        checkpoints.resume(fresh_state())


def test_an_optimizer_that_would_need_pickle_is_refused(tmp_path):
    state = fresh_state()
    train(state, 0, 1)
    next(iter(state.update.optimizer.state.values()))["history"] = {1, 2}
    with pytest.raises(CheckpointError, match=r"a set \(0/history\), which can't be saved without pickle"):
        Checkpoints(tmp_path, 1).save(1, state)


def test_a_checkpoint_of_another_configuration_is_refused_with_what_differs(tmp_path):
    Checkpoints(tmp_path, 1, {"lora": {"rank": 4}, "seed": 0}).save(1, fresh_state())
    with pytest.raises(CheckpointError, match=r"lora was \{'rank': 4\}, is \{'rank': 8\}"):
        Checkpoints(tmp_path, 1, {"lora": {"rank": 8}, "seed": 0}).resume(fresh_state())


def test_a_checkpoint_holds_no_pickle(tmp_path):
    folder = Checkpoints(tmp_path, 1, {}).save(1, fresh_state())
    for file in folder.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            load_file(file)


def test_nothing_to_resume_is_step_zero(tmp_path):
    assert Checkpoints(tmp_path / "none", 1, {}).resume(fresh_state()) == 0


def test_a_damaged_later_checkpoint_does_not_push_out_the_one_just_saved(tmp_path):
    (tmp_path / "step-00000099").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, 1, {})
    for step in (1, 2):
        checkpoints.save(step, fresh_state())
        assert checkpoints.resume(fresh_state()) == step


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"a": 1}', "{"])
def test_a_manifest_that_is_none_makes_a_checkpoint_unusable(tmp_path, manifest):
    checkpoints = Checkpoints(tmp_path, 2, {})
    checkpoints.save(1, fresh_state())
    folder = checkpoints.save(2, fresh_state())
    (folder / "manifest.json").write_text(manifest)
    assert checkpoints.resume(fresh_state()) == 1


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "step-notes").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, 1, {})
    for step in (1, 2):
        checkpoints.save(step, fresh_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-notes"]


def test_a_save_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 1, {})
    checkpoints.save(1, fresh_state())
    monkeypatch.setattr(
        "qflux.training.checkpoint.write_tensors", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(OSError, match="full"):
        checkpoints.save(2, fresh_state())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_starts_of_epochs_come_back_for_the_same_data_only(tmp_path):
    state = fresh_state()
    state.plan.starts = [0, 3, 7]
    Checkpoints(tmp_path, 1, {"seed": 0, "data (samples)": "abc", "lora": 4}).save(1, state)
    assert known_starts(read_past(tmp_path, World()), {"seed": 0, "data (samples)": "abc"}) == [0, 3, 7]
    assert known_starts(read_past(tmp_path, World()), {"seed": 1, "data (samples)": "abc"}) is None
    assert read_past(tmp_path / "none", World()) is None
