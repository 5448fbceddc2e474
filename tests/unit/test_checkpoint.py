from __future__ import annotations

import json

import pytest
import torch
from diffusers.optimization import get_scheduler
from safetensors.torch import load_file

from qflux.data.plan import Batching, TrainingPlan
from qflux.errors import CheckpointError
from qflux.training.checkpoint import Checkpoints, TrainingState


def fresh_state(optimizer=torch.optim.AdamW) -> TrainingState:
    torch.manual_seed(0)
    parameters = {name: torch.nn.Parameter(torch.randn(3, 2)) for name in ("b.weight", "a.weight")}
    built = optimizer(list(parameters.values()), lr=0.1)
    return TrainingState(
        parameters,
        built,
        get_scheduler("cosine", built, num_warmup_steps=2, num_training_steps=20),
        TrainingPlan([1], Batching()),
    )


def train(state: TrainingState, steps: int) -> None:
    for _ in range(steps):
        loss = sum(parameter.square().sum() for parameter in state.parameters.values())
        loss.backward()
        state.optimizer.step()
        state.schedule.step()
        state.optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_loaded_state_continues_as_the_saved_one(tmp_path, optimizer):
    checkpoints = Checkpoints(tmp_path, 2, {})
    state = fresh_state(optimizer)
    train(state, 5)
    checkpoints.save(5, state)
    other = fresh_state(optimizer)
    assert checkpoints.resume(other) == 5
    train(state, 5)
    train(other, 5)
    for name, parameter in state.parameters.items():
        assert torch.equal(parameter, other.parameters[name])
    assert state.schedule.get_last_lr() == other.schedule.get_last_lr()


def test_the_newest_complete_checkpoint_is_taken_and_torn_ones_are_named(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, 5, {})
    state = fresh_state()
    for step in (1, 2, 3, 4):
        train(state, 1)
        checkpoints.save(step, state)
    (tmp_path / "step-00000004" / "adapter.safetensors").unlink()
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
    assert Checkpoints(tmp_path, 1).epoch_starts({"seed": 0, "data (samples)": "abc"}) == [0, 3, 7]
    assert Checkpoints(tmp_path, 1).epoch_starts({"seed": 1, "data (samples)": "abc"}) is None
    assert Checkpoints(tmp_path / "none", 1).epoch_starts({}) is None
