"""`qflux predict --compare`, and what networks of somebody's own say of edits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from helpers import lines, run, write_config
from qflux.commands import Trainer
from qflux.errors import CheckpointError
from qflux.measures.edit import EditMeasures, measure
from qflux.sampling.jobs.comparison import BEFORE, FILE
from qflux.sampling.likeness import Likeness
from qflux.sampling.prepare import Edit


@pytest.fixture
def folder(data_set, tmp_path) -> Path:
    """Four edits: one with what is wanted, one with a mask, one with both, one with neither."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for number in range(4):
        name = f"scene_{number:03d}"
        shutil.copy(next((data_set / "control_images").glob(f"{name}.*")), jobs / f"{name}.png")
        (jobs / f"{name}.txt").write_text("turn the day into night")
        if number in (0, 2):
            shutil.copy(next((data_set / "training_images").glob(f"{name}.png")), jobs / f"{name}_wanted.png")
        if number in (1, 2):
            mask = Image.new("L", Image.open(jobs / f"{name}.png").size)
            ImageDraw.Draw(mask).rectangle((0, 0, mask.width // 2, mask.height), fill=255)
            mask.save(jobs / f"{name}_mask.png")
    return jobs


@pytest.fixture
def lora(config) -> Path:
    trainer = Trainer(config("optimizer.init_args={lr: 0.03}", "lora.alpha=10", "run_name=lora"))
    return trainer.fit().adapter


def test_edits_are_measured_with_the_lora_and_without(config, folder, lora, tmp_path, capsys):
    settings = config("predict.num_inference_steps=2", "predict.preprocessing=config")
    command = ["predict", "--config", write_config(settings, tmp_path / "config.yaml"), "--jobs", folder, "--compare"]
    command += ["--output", tmp_path / "edits", "--lora", lora]
    assert run(*command) == 0
    printed = capsys.readouterr().out
    assert "mean of 4 edits" in printed
    assert "outside_colour" in printed
    found = {line["name"]: line for line in map(json.loads, (tmp_path / "edits" / FILE).read_text().splitlines())}
    assert set(found) == {f"scene_{number:03d}" for number in range(4)}
    assert {"blur", "vae_blur"} <= set(found["scene_000"]["after"])
    assert {"outside_colour", "outside_ssim", "cast"} <= set(found["scene_001"]["after"])
    assert {"done", "outside_colour"} <= set(found["scene_002"]["after"])
    assert "outside_colour" not in found["scene_003"]["after"]
    assert found["scene_001"]["before"]["outside_colour"] != found["scene_001"]["after"]["outside_colour"]
    known = [line["after"].get("outside_colour", -1) for line in found.values()]
    assert known == sorted(known, reverse=True), "the worst first"

    # By hand: the control as the VAE returns it, against the picture in the folder, outside of the mask.
    predictor = Trainer(settings).predictor([])
    control = Image.open(folder / "scene_001.png").convert("RGB")
    _, returned = predictor.prepare.returned(Edit((control,), "x"), control)
    output = Image.open(tmp_path / "edits/scene_001.png").convert("RGB")
    assert returned.size == output.size
    mask = np.asarray(Image.open(folder / "scene_001_mask.png").resize(output.size)) / 255
    by_hand = measure(output, returned, None, mask.astype(np.float32)).outside_colour
    assert found["scene_001"]["after"]["outside_colour"] == pytest.approx(by_hand, rel=0.05)

    # Again: nothing is made anew, and the same is said.
    before = (tmp_path / "edits" / FILE).read_bytes()
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "edits").rglob("scene*.png")}
    assert len(list((tmp_path / "edits" / BEFORE).glob("scene*.png"))) == 4
    assert run(*command) == 0
    assert (tmp_path / "edits" / FILE).read_bytes() == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_what_is_wanted_and_masks_are_no_jobs_of_their_own(folder):
    from qflux.sampling.jobs.lists import read_jobs

    listed = read_jobs(folder)
    assert [job.name for job in listed.jobs] == [f"scene_{number:03d}" for number in range(4)]
    assert listed.jobs[2].wanted == folder / "scene_002_wanted.png"
    assert listed.jobs[2].mask == folder / "scene_002_mask.png"
    (folder / "table.jsonl").write_text(json.dumps({"image": "scene_003.png", "prompt": "x", "wanted": "nothing.png"}))
    assert "there is no file" in read_jobs(folder / "table.jsonl").problems[0]


def test_one_edit_is_no_list_to_compare(config, tmp_path, capsys):
    file = write_config(config(), tmp_path / "config.yaml")
    assert run("predict", "--config", file, "--prompt", "x", "--compare") == 2
    assert "--compare needs a list of edits" in capsys.readouterr().err


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> dict[str, str]:
    """Small real ones: DINOv2's and CLIP's classes, random weights."""
    from transformers import (
        BitImageProcessor,
        CLIPConfig,
        CLIPImageProcessor,
        CLIPModel,
        Dinov2Config,
        Dinov2Model,
    )

    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("networks")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**small)).save_pretrained(root / "dino")
    BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(root / "dino")
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    CLIPModel(CLIPConfig(text_config=text, vision_config=small)).save_pretrained(root / "clip")
    CLIPImageProcessor(size={"shortest_edge": 28}).save_pretrained(root / "clip")
    return {"dino": str(root / "dino"), "clip": str(root / "clip")}


def test_networks_say_how_alike_an_edit_and_what_was_wanted_are(networks):
    from transformers import AutoImageProcessor, Dinov2Model

    likeness = Likeness(networks)
    rng = np.random.default_rng(0)
    first, second = (Image.fromarray(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)) for _ in range(2))
    same = likeness.added(EditMeasures(), first, second, first).perceptual
    assert same == pytest.approx({"dino_wanted": 1.0, "clip_wanted": 1.0}, abs=1e-5)
    found = likeness.added(EditMeasures(blur=1.0), first, second, None)
    assert found.blur == 1.0
    assert set(found.perceptual) == {"dino_control", "clip_control"}
    # At the network's own size the processor only normalises: the same by transformers alone.
    model, processor = (
        Dinov2Model.from_pretrained(networks["dino"]),
        AutoImageProcessor.from_pretrained(networks["dino"]),
    )
    with torch.no_grad():
        pooled = [
            model(**processor(image, return_tensors="pt", do_resize=False, do_center_crop=False)).pooler_output[0]
            for image in (first, second)
        ]
    assert found.perceptual["dino_control"] == pytest.approx(float(torch.cosine_similarity(*pooled, dim=0)), abs=1e-4)
    assert likeness.added(EditMeasures(), first, None, None) == EditMeasures()


def test_they_are_asked_at_every_checkpoint(config, networks, tmp_path):
    named = json.dumps(networks)
    settings = config(
        "data.held_out={count: 2}",
        f"validation.perceptual={named}",
        "validation.num_inference_steps=2",
        "train.max_train_steps=2",
    )
    Trainer(settings).fit()
    line = lines(settings, "validation.jsonl")[-1]
    assert set(line["perceptual"]) == {"dino_wanted", "clip_wanted"}
    assert all("dino_wanted" in edit for edit in line["edits"])


def test_a_network_that_can_not_be_loaded_is_named_before_anything_is_trained(config, tmp_path):
    settings = config("data.held_out={count: 2}", f"validation.perceptual={{dino: {tmp_path / 'nothing'}}}")
    with pytest.raises(CheckpointError, match=r"validation\.perceptual\.dino: .* can't be loaded"):
        Trainer(settings).fit()
