"""Checkpoints are measured on held-out samples: the loss, the edits, and which one is best."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from helpers import lines
from qflux.commands import Trainer
from qflux.errors import Interrupted
from qflux.report.page import write_report
from qflux.runs.folder import RunFolder
from qflux.sampling.sampler import Sampler
from qflux.training.edits import DrawnEdits

EVERY = ["train.checkpoint_every=2"]
HELD_OUT = ["data.held_out={count: 3}", "validation.images=2", "validation.num_inference_steps=2"]


def test_held_out_loss_is_the_same_for_the_same_weights_and_does_not_disturb_training(config):
    plain = config("run_name=plain", "data.held_out={count: 3}", "validation.images=0", "train.max_train_steps=4")
    often = config("run_name=often", *HELD_OUT, "train.max_train_steps=4", "train.checkpoint_every=1")
    first, second = (Trainer(settings).fit() for settings in (plain, often))
    assert first.adapter.read_bytes() == second.adapter.read_bytes()
    sparse, dense = lines(plain, "validation.jsonl"), lines(often, "validation.jsonl")
    assert [line["step"] for line in sparse] == [0, 4]
    assert [line["step"] for line in dense] == [0, 1, 2, 3, 4]
    assert [dense[0]["held_out_loss"], dense[4]["held_out_loss"]] == [line["held_out_loss"] for line in sparse]
    for line in dense:
        assert np.mean(line["held_out_loss_by_level"]) == pytest.approx(line["held_out_loss"])
    assert dense[0]["held_out_loss"] != dense[4]["held_out_loss"]


def test_the_best_adapter_is_the_one_of_the_lowest_held_out_loss(config):
    """A rate far too high: the first checkpoints are better than the last."""
    settings = config(
        *HELD_OUT,
        "validation.images=0",
        "train.max_train_steps=6",
        "train.checkpoint_every=1",
        "train.keep_checkpoints=1",
        "optimizer.init_args={lr: 0.3}",
    )
    result = Trainer(settings).fit()
    losses = {line["step"]: line["held_out_loss"] for line in lines(settings, "validation.jsonl") if line["step"]}
    best = min(losses, key=losses.get)
    assert result.best == (settings.run_dir / "checkpoints" / f"step-{best:08d}", losses[best])
    kept = sorted(path.name for path in (settings.run_dir / "checkpoints").iterdir())
    assert kept == sorted({f"step-{best:08d}", "step-00000006"})
    parameters = load_file(result.best[0] / "parameters.safetensors")
    adapter = load_file(settings.run_dir / "best" / "pytorch_lora_weights.safetensors")
    assert all(torch.equal(adapter["transformer." + n.replace(".default.", ".")], t) for n, t in parameters.items())


@pytest.mark.slow
def test_validation_draws_edits_of_different_sizes_as_one_batch_and_measures_their_drift(config):
    settings = config(*HELD_OUT, "validation.images=3", "train.max_train_steps=2")
    Trainer(settings).fit()
    for step in (0, 2):
        grid = settings.run_dir / "samples" / f"step-{step:08d}.png"
        outputs = sorted((settings.run_dir / "samples" / f"step-{step:08d}").glob("*.png"))
        assert grid.is_file()
        assert len(outputs) == 3
        assert len({Image.open(file).size for file in outputs}) > 1
    line = lines(settings, "validation.jsonl")[-1]
    assert {"down", "right", "zoom", "confidence", "name"} == set(line["drifts"][0])


@pytest.mark.slow
def test_validation_with_guidance_needs_the_empty_prompt_of_held_out_samples_only(config):
    settings = config(*HELD_OUT, "validation.true_cfg_scale=4.0", "cache.path=null", "train.max_train_steps=1")
    plain = config(*HELD_OUT, "cache.path=null", "train.max_train_steps=1", "run_name=plain")
    first = Trainer(plain).cache()
    second = Trainer(settings).cache()
    assert first.new_entries > second.new_entries > 0
    pictures = []
    for one in (plain, settings):
        Trainer(one).fit()
        pictures.append((one.run_dir / "samples" / "step-00000000.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_a_run_stopped_at_a_checkpoint_validates_it_when_it_goes_on(config):
    shared = [*HELD_OUT, "validation.images=0", "train.max_train_steps=4", "train.checkpoint_every=2"]
    whole, stopped = config(*shared, "run_name=whole"), config(*shared, "run_name=stopped")

    def stop(report) -> None:
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer(whole).fit()
    with pytest.raises(Interrupted):
        Trainer(stopped).fit(stop)
    Trainer(stopped).fit()
    assert lines(stopped, "validation.jsonl") == lines(whole, "validation.jsonl")
    for settings in (whole, stopped):
        saved = settings.run_dir / "checkpoints" / "step-00000002" / "state.json"
        assert json.loads(saved.read_text())["held_out"] is not None


def run_of(settings) -> RunFolder:
    Trainer(settings).fit()
    return RunFolder(settings.run_dir)


def test_every_checkpoint_says_what_its_edits_did_besides(config):
    settings = config("data.held_out={count: 3}", "validation.images=3", "validation.num_inference_steps=2", *EVERY)
    run = run_of(settings)
    assert [line["step"] for line in run.validations] == [0, 2, 3]
    for report in run.validation_reports:
        assert len(report.edits) == 3
        each = [edit["outside_colour"] for edit in report.edits]
        assert report.outside_colour == pytest.approx(np.mean(each), abs=1e-4)
        assert all(-1 <= edit["outside_ssim"] <= 1 for edit in report.edits)
        assert all(edit["done"] < 1 for edit in report.edits), "an untrained model has done nothing"
    page = write_report([run.path], run.path / "again.html").read_text()
    assert "Colours outside the edited region" in page
    worst = max(run.measured_edits.values(), key=lambda edit: edit["outside_colour"])
    others = [name for name in run.measured_edits if name != worst["name"]]
    assert all(page.index(f"<b>{worst['name']}</b>") < page.index(f"<b>{name}</b>") for name in others)
    assert f"colours outside {worst['outside_colour']:.1f}" in page


def test_a_wanted_image_that_comes_out_is_measured_as_done(config, monkeypatch):
    """The measures are of what the VAE returns: a model that gives the target's latents back has no fault."""
    settings = config("data.held_out={count: 2}", "validation.images=2", "validation.num_inference_steps=2", *EVERY)
    wanted = []
    encoded = DrawnEdits._encoded
    monkeypatch.setattr(DrawnEdits, "_encoded", lambda self, *args: wanted.append(encoded(self, *args)) or wanted[-1])
    monkeypatch.setattr(Sampler, "__call__", lambda self, edits, *_: [each.target for each in wanted[-len(edits) :]])
    report = run_of(settings).validation_reports[-1]
    assert report.done == pytest.approx(1)
    assert report.blur == pytest.approx(0, abs=1e-4)
