"""`qflux demo`: what a new user sees first."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.images.pixels import to_image
from qflux.demo.instructions import KINDS, SIZES, draw_instruction
from qflux.demo.run import SETTINGS, demo_config, run_demo
from qflux.demo.scenes import draw_scene, render, render_night
from qflux.errors import ConfigError
from qflux.models.registry import shipped
from qflux.sampling.predictor import Edit


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.held_out=null"], "data.held_out is null"),
        (["model.pretrained=black-forest-labs/FLUX.1-Kontext-dev"], "brings its own model"),
    ],
)
def test_what_the_demo_can_not_do_is_said_before_anything_is_made(overrides, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run_demo(demo_config(tmp_path / "demo", overrides), lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=f"{file} can't be made"):
        run_demo(demo_config(file), lambda *_: None)
    shutil.copytree(shipped().folder, tmp_path / "taken" / "model")
    with pytest.raises(ConfigError, match="another family"):
        run_demo(demo_config(tmp_path / "taken", family="qwen-image"), lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen-image", "qwen-image-edit-plus"])
def test_the_other_families_show_the_path(family, tmp_path):
    overrides = ["train.max_train_steps=2", "predict.num_inference_steps=2", "validation.num_inference_steps=2"]
    summary = run_demo(demo_config(tmp_path / family, overrides, family), lambda *_: None)
    assert all(file.is_file() for file in summary.files.values())


@pytest.mark.slow
def test_a_quarter_of_the_demo_learns_the_edit_on_every_held_out_scene_and_can_be_run_again(tmp_path):
    """The error halves on average, and no scene is left behind, whatever its size."""
    overrides = ["train.max_train_steps=80", "train.checkpoint_every=80", "validation.images=8"]
    config, seen = demo_config(tmp_path / "demo", overrides), set()
    summary = run_demo(config, lambda stage, *_: seen.add(stage))
    before, after = summary.error
    assert after <= 0.5 * before
    folders = sorted((config.run_dir / "samples").glob("step-*/edits.json"))
    assert len(folders) == 2
    edits = json.loads(folders[-1].read_text())["edits"]
    assert len(edits) == 8
    for item in edits:
        drawn, wanted, control = (
            np.asarray(Image.open(folders[-1].parent / item[kind]), dtype=float)
            for kind in ("output", "wanted", "control")
        )
        assert np.abs(drawn - wanted).mean() < 0.5 * np.abs(control - wanted).mean(), item["name"]

    assert seen == {"cache", "fit", "predict"}
    assert summary.samples == 152
    assert len(summary.sizes) == 12
    assert 0.05 < summary.padding_avoided < 0.6
    for file in summary.files.values():
        assert file.is_file()
        if file.suffix == ".png":
            assert min(Image.open(file).size) > 200
    again = run_demo(config, lambda *_: None)
    assert again.error == summary.error


def test_the_base_is_small_and_safe():
    files = [file for file in shipped().folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 20e6
    assert {file.suffix for file in files} <= {".safetensors", ".json"}


@pytest.mark.slow
def test_the_base_reconstructs_scenes_of_all_sizes_by_day_and_by_night():
    vae = AutoencoderKL.from_pretrained(shipped().folder / "vae", torch_dtype=torch.float32)
    rng = random.Random(7)
    for size in SIZES:
        scene = draw_scene(rng, *size)
        for picture in (render([scene]), render_night([scene])):
            wanted = picture * 2 - 1
            with torch.no_grad():
                error = (vae(wanted).sample.clamp(-1, 1) - wanted).square().mean()
            assert 10 * torch.log10(4 / error) >= 28, size


@pytest.mark.slow
def test_the_base_follows_instructions_on_scenes_of_all_sizes(tmp_path):
    """All in one batch. What should change is nearer to the wanted picture than to the given one."""
    rng = random.Random(8)
    instructions = [draw_instruction(rng, size, kind) for kind in KINDS for size in rng.sample(SIZES, 3)]

    def picture(scene):
        return to_image(render([scene])[0] * 2 - 1)

    edits = [
        Edit(
            controls=tuple(picture(scene) for scene in (item.before, item.second) if scene),
            prompt=item.prompt,
            seed=number,
            size=(item.before.height, item.before.width),
        )
        for number, item in enumerate(instructions)
    ]
    config = load_config(
        SETTINGS, [f"model.pretrained={shipped().folder}", f"output_dir={tmp_path}", f"data.path={tmp_path}"]
    )
    done = []
    for item, output in zip(instructions, Trainer(config).predictor([])(edits), strict=True):
        made, given, wanted = (
            np.asarray(image, dtype=float) for image in (output, picture(item.before), picture(item.after))
        )
        changes = np.abs(given - wanted).mean(-1) > 12
        assert np.abs(made - wanted)[~changes].mean() < 12, item.prompt
        if changes.any():
            done.append(np.abs(made - wanted)[changes].mean() < 0.5 * np.abs(given - wanted)[changes].mean())
    assert len(done) > 20
    assert np.mean(done) >= 0.9
