"""`qflux demo`: what a new user sees first."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from qflux.demo.base import FOLDER
from qflux.demo.run import DemoProgress, demo_config, run_demo


def test_the_demo_runs_the_whole_path_and_can_be_run_again(tmp_path):
    seen: set[str] = set()
    progress = DemoProgress(lambda stage, done, total, note: seen.add(stage))
    overrides = ["train.max_train_steps=4", "predict.num_inference_steps=2", "validation.num_inference_steps=2"]
    summary = run_demo(demo_config(tmp_path / "demo", overrides), progress)
    assert seen == {"cache", "fit", "predict"}
    assert summary.samples == 152
    assert len(summary.sizes) == 12
    assert 0.05 < summary.padding_avoided < 0.6
    for file in summary.files:
        assert file.is_file()
        if file.suffix == ".png":
            assert min(Image.open(file).size) > 200
    again = run_demo(demo_config(tmp_path / "demo", overrides), progress)
    assert again.error == summary.error


@pytest.mark.parametrize("family", ["qwen-image", "qwen-image-edit-plus"])
def test_the_other_families_show_the_path(family, tmp_path):
    overrides = ["train.max_train_steps=2", "predict.num_inference_steps=2", "validation.num_inference_steps=2"]
    summary = run_demo(demo_config(tmp_path / family, overrides, family), DemoProgress(lambda *_: None))
    assert all(file.is_file() for file in summary.files)


def test_the_default_demo_learns_the_edit_at_every_size(tmp_path):
    """What the README promises: the error of held-out edits at least halves, and no size is left behind."""
    config = demo_config(tmp_path / "demo")
    summary = run_demo(config, DemoProgress(lambda *_: None))
    before, after = summary.error
    assert after <= 0.5 * before
    folders = sorted((config.run_dir / "samples").glob("step-*/edits.json"))
    assert len(folders) == 5
    for item in json.loads(folders[-1].read_text())["edits"]:
        drawn, wanted, control = (
            np.asarray(Image.open(folders[-1].parent / item[kind]), dtype=float)
            for kind in ("output", "wanted", "control")
        )
        assert np.abs(drawn - wanted).mean() < 0.5 * np.abs(control - wanted).mean(), item["name"]


def test_the_base_is_small_and_safe():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 20e6
    assert {file.suffix for file in files} <= {".safetensors", ".json"}
