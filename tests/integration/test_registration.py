"""Pairs that are off by pixels: measured against a known truth, and written anew without touching originals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from helpers import run, tree
from published import photo
from qflux.data.lint.registration import Registration, covered, register, registered

SIZES = [(300, 420), (512, 384), (256, 256)]


def scene(seed: int, x: np.ndarray, y: np.ndarray) -> Image.Image:
    """A picture at any places `(H, W)`: waves and soft edges, exact to the rounding of a pixel's value."""
    random = np.random.default_rng(seed)
    channels = []
    for _ in range(3):
        value = np.full(x.shape, 128.0)
        for _ in range(14):
            angle, length = random.uniform(0, np.pi), random.uniform(7, 90)
            value += 9 * np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / length + random.uniform(0, 6))
        for _ in range(6):
            at, radius = random.uniform(0, 400, 2), random.uniform(15, 60)
            value += 30 * np.tanh((radius - np.hypot(x - at[0], y - at[1])) / 1.5) + 25
        channels.append(value)
    return Image.fromarray(np.clip(np.stack(channels, -1).round(), 0, 255).astype(np.uint8))


def pair(
    size: tuple[int, int], right: float, down: float, zoom: float, seed: int = 0, edit: bool = True
) -> tuple[Image.Image, Image.Image]:
    """A control and its target, where the same things are moved and larger, and there is a red rectangle besides."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    control = scene(seed, x, y)
    target = scene(seed, middle_x + (x - middle_x - right) / zoom, middle_y + (y - middle_y - down) / zoom)
    if edit:
        ImageDraw.Draw(target).rectangle((0.3 * width, 0.3 * height, 0.5 * width, 0.6 * height), fill=(200, 30, 30))
    return control, target


def off_by(found: Registration, size: tuple[int, int], right: float, down: float, zoom: float) -> float:
    """How far a corner lies from where it should be."""
    corners = [(x, y) for x in (-size[0] / 2, size[0] / 2) for y in (-size[1] / 2, size[1] / 2)]
    return max(
        np.hypot((found.zoom - zoom) * x + found.right - right, (found.zoom - zoom) * y + found.down - down)
        for x, y in corners
    )


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(SIZES), st.floats(-3, 3), st.floats(-3, 3), st.floats(0.99, 1.01), st.integers(0, 5))
def test_shift_and_scale_are_found_to_a_tenth_of_a_pixel(size, right, down, zoom, seed):
    """What is less than a quarter of a pixel anywhere may count as nothing: it has to be seen beside the edit."""
    found = register(*pair(size, right, down, zoom, seed))
    assert found is not None
    stands_still = (found.right, found.down, found.zoom) == (0, 0, 1)
    assert off_by(found, size, right, down, zoom) < (0.25 if stands_still else 0.1)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(SIZES), st.floats(-3, 3), st.floats(-3, 3), st.floats(0.99, 1.01))
def test_what_is_registered_has_nothing_left_to_register(size, right, down, zoom):
    control, target = pair(size, right, down, zoom, seed=3)
    found = register(control, target)
    assert found is not None
    box = covered(size, found)
    assert 0 <= box[0] < box[2] <= size[0]
    assert 0 <= box[1] < box[3] <= size[1]
    again = register(control.crop(box), registered(target, found).crop(box))
    assert again is not None
    assert again.reach(*size) < 0.1
    assert not again.is_off


def test_a_third_of_a_pixel_is_seen():
    found = register(*pair((512, 384), 0.3, 0.0, 1.0, edit=False))
    assert found is not None
    assert found.right == pytest.approx(0.3, abs=0.05)
    assert found.down == pytest.approx(0.0, abs=0.05)
    assert found.is_off


def test_a_pair_in_register_is_left_alone():
    found = register(*pair((512, 384), 0.0, 0.0, 1.0))
    assert found is not None
    assert not found.is_off
    assert not found.has_cast


def test_a_colour_cast_is_measured_beside_the_edit():
    control, target = pair((256, 256), 1.0, 0.0, 1.0)
    warmer = np.asarray(target, dtype=np.float64) * (1.0, 1.0, 0.85)
    found = register(control, Image.fromarray(warmer.round().astype(np.uint8)))
    assert found is not None
    assert found.has_cast
    assert found.cast[2] > 3
    assert abs(found.right - 1) < 0.1


def test_pictures_of_other_things_and_flat_ones_are_not_registered():
    assert register(photo(256, 192, 1), photo(256, 192, 8)) is None
    assert register(Image.new("RGB", (200, 200), "grey"), Image.new("RGB", (200, 200), "grey")) is None
    assert register(Image.new("RGB", (8, 8), "grey"), Image.new("RGB", (8, 8), "red")) is None


@pytest.fixture
def unregistered(tmp_path):
    """A folder of four pairs: two that are off, one in register with a mask, one whose images differ in size."""
    root = tmp_path / "data"
    for folder in ("training_images", "control_images"):
        (root / folder).mkdir(parents=True)
    cases = {"left": (-2.3, 1.4, 1.008), "down": (0.0, 2.6, 1.0), "fine": (0.0, 0.0, 1.0), "other": (0.0, 0.0, 1.0)}
    for number, (name, (right, down, zoom)) in enumerate(cases.items()):
        control, target = pair((256, 256), right, down, zoom, seed=number)
        control = control.resize((128, 128)) if name == "other" else control
        control.save(root / "control_images" / f"{name}.png")
        target.save(root / "training_images" / f"{name}.png")
        (root / "training_images" / f"{name}.txt").write_text(f"paint it {name}\n", encoding="utf-8")
    mask = Image.new("L", (256, 256))
    ImageDraw.Draw(mask).rectangle((70, 70, 130, 155), fill=255)
    mask.save(root / "control_images" / "left_mask.png")
    Image.new("RGB", (64, 64), "blue").save(root / "control_images" / "down_control_1.png")
    return root


def inspected(config, data, *arguments: object) -> int:
    from helpers import write_config

    settings = config(f"data.path={data}")
    return run("inspect", write_config(settings, settings.output_dir.parent / "config.yaml"), *arguments)


def test_inspect_fix_writes_copies_in_register_and_leaves_originals(config, unregistered, tmp_path, capsys):
    before = tree(unregistered)
    fixed = tmp_path / "fixed"
    assert inspected(config, unregistered, "--fix", fixed, "--json", tmp_path / "findings.json") == 0
    assert tree(unregistered) == before
    assert "4 samples, 2 of them moved, 1 could not be compared" in capsys.readouterr().out.replace("\n", " ")

    kinds = [item["what"] for item in json.loads((tmp_path / "findings.json").read_text())["findings"]
             if item["kind"] == "off by pixels"]  # fmt: skip
    assert sorted(kinds) == ["down", "left"]
    for name in ("left", "down"):
        control, target = (
            Image.open(fixed / folder / f"{name}.png") for folder in ("control_images", "training_images")
        )
        assert control.size == target.size
        found = register(control.convert("RGB"), target.convert("RGB"))
        assert found is not None
        assert found.reach(*control.size) < 0.1
        assert (fixed / "training_images" / f"{name}.txt").read_text() == f"paint it {name}\n"
    assert (
        Image.open(fixed / "control_images" / "left_mask.png").size
        == Image.open(fixed / "control_images" / "left.png").size
    )
    for name in ("training_images/fine.png", "control_images/fine.png", "control_images/down_control_1.png"):
        assert (fixed / name).read_bytes() == (unregistered / name).read_bytes()
    assert (fixed / "registration.png").is_file()
    lines = [json.loads(line) for line in (fixed / "registration.jsonl").read_text().splitlines()]
    assert {line["name"]: line["moved"] for line in lines} == {
        "down": True,
        "fine": False,
        "left": True,
        "other": False,
    }
    # The copies are a data set like any other, and nothing in it is off any more.
    assert inspected(config, fixed, "--json", tmp_path / "again.json") == 0
    assert "off by pixels" not in (tmp_path / "again.json").read_text()
    assert inspected(config, unregistered, "--fix", fixed) == 2
    assert "is not empty" in capsys.readouterr().err


def test_masks_are_made_of_what_differs(config, unregistered, tmp_path):
    before, masks = tree(unregistered), tmp_path / "masks"
    assert inspected(config, unregistered, "--masks", masks) == 0
    assert tree(unregistered) == before
    assert sorted(file.name for file in masks.iterdir()) == ["down_mask.png", "fine_mask.png"]  # left has one already
    drawn = np.asarray(Image.open(masks / "fine_mask.png")) > 127
    assert drawn[100, 100]
    assert drawn[75:155, 78:126].all()
    assert drawn.mean() < 0.2
