"""What would fail later is found before the first step, and leaves no trace."""

from __future__ import annotations

import shutil

import pytest
import torch

from qflux.commands import Trainer
from qflux.errors import ConfigError, QfluxError
from qflux.training.preflight import probes
from qflux.training.preflight.rehearsal import Rehearsal

HELD_OUT = ["data.held_out={count: 3}", "validation.images=2", "validation.num_inference_steps=2"]


def test_running_out_of_memory_names_the_sample_that_fits_nowhere_and_what_to_change(config, monkeypatch, caplog):
    """Smaller passes are tried first, down to a sample alone."""
    settings = config("data.batch_size=3", "train.max_train_steps=20")
    trainer = Trainer(settings)
    lengths = {s.name: s.tokens for s in trainer.samples().training}
    tried = []

    def exhausted(self, batch):
        tried.append(sum(batch.lengths))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr("qflux.training.model.TrainedModel.velocity", exhausted)
    with pytest.raises(QfluxError, match=r"not enough memory for a pass of \d+ tokens: scene_.*20\.00 GiB") as caught:
        trainer.fit()
    assert tried == sorted(tried, reverse=True)
    assert tried[0] > max(lengths.values()) >= tried[-1]
    assert "smaller areas in data.processor" in str(caught.value)
    assert "model.precision: auto" in str(caught.value)
    assert len([name for name in lengths if name in str(caught.value)]) == 1
    assert "before the first step: there is not enough memory" in caplog.text
    assert not (settings.run_dir / "checkpoints").exists()


def test_too_little_disk_is_found_before_the_first_step(config, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(QfluxError, match=r"checkpoints may take .* MB"):
        Trainer(config()).fit()


def test_preflight_leaves_no_trace_in_the_result(config):
    shared = [
        *HELD_OUT,
        "train.max_train_steps=3",
        "optimizer.class_path=prodigyopt.Prodigy",
        "optimizer.init_args={lr: 1.0}",
    ]
    with_, without = (
        Trainer(config(*shared, f"run_name=preflight-{name}", f"train.preflight={name}")).fit()
        for name in ("true", "false")
    )
    assert with_.adapter.read_bytes() == without.adapter.read_bytes()
    assert not (with_.adapter.parents[1] / "checkpoints" / ".preflight").exists()


def test_a_package_that_is_missing_is_named_before_anything_is_loaded(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.setattr("qflux.models.pretrained.load_transformer", lambda *_: pytest.fail("too late"))
    with pytest.raises(
        ConfigError, match=r"train\.trackers: wandb is not installed(.|\n)*pip install 'qflux\[wandb\]'"
    ):
        Trainer(config("train.trackers=[wandb]")).fit()


def test_the_largest_batch_is_tried_with_everything_dropout_could_take_away(config, monkeypatch):
    settings = config("train.control_dropout=0.9", "train.caption_dropout=0.9", "cache.path=null")
    Trainer(settings).cache()
    seen = []
    original = Rehearsal.step
    monkeypatch.setattr(
        Rehearsal, "step", lambda self, batch, *rest: seen.append(batch) or original(self, batch, *rest)
    )
    Trainer(settings).fit()
    (batch,) = seen
    assert all(shapes.controls for shapes in batch.shapes)


def test_what_a_killed_preflight_leaves_does_not_matter(config):
    settings = config()
    torn = settings.run_dir / "checkpoints" / ".preflight" / "step-00000000"
    torn.mkdir(parents=True)
    (torn / "manifest.json").write_text("{}")
    Trainer(settings).fit()
    assert not torn.parent.exists()


def test_a_resumed_run_needs_no_room_for_checkpoints_it_has(config, monkeypatch):
    settings = config("train.max_train_steps=1")
    Trainer(settings).fit()
    there = sum(f.stat().st_size for f in (settings.run_dir / "checkpoints").rglob("*") if f.is_file())
    usage = shutil.disk_usage("/")._replace(free=3 * there)
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda path: usage)
    Trainer(config("train.max_train_steps=2")).fit()
