"""TensorBoard, W&B and SwanLab get what metrics.jsonl has."""

from __future__ import annotations

import pytest

from helpers import lines
from qflux.commands import Trainer

HELD_OUT = ["data.held_out={count: 3}", "validation.images=2", "validation.num_inference_steps=2"]


def test_tensorboard_gets_every_step_once_and_the_pictures(config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shared = ["train.trackers=[tensorboard]", *HELD_OUT, "train.checkpoint_every=2"]
    Trainer(config(*shared, "train.max_train_steps=2")).fit()
    settings = config(*shared, "train.max_train_steps=4")
    Trainer(settings).fit()
    events = EventAccumulator(str(settings.run_dir / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in lines(settings)}, rel=1e-6)
    assert [event.step for event in events.Scalars("validation/held_out_loss")] == [0, 2, 4]
    assert {event.step for event in events.Images("validation/edits")} == {0, 2, 4}


@pytest.mark.slow
def test_wandb_works_offline(config, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = config("train.trackers=[wandb]", *HELD_OUT)
    Trainer(settings).fit()
    assert list((settings.run_dir / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
def test_swanlab_works_offline(config, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    settings = config("train.trackers=[swanlab]", *HELD_OUT)
    Trainer(settings).fit()
    assert any((settings.run_dir / "swanlab").rglob("*"))
