from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from qflux.data.lint.alignment import drift_between

SIZES = [(320, 240), (256, 256), (200, 400), (512, 384)]


def scene(seed: int, size: tuple[int, int]) -> Image.Image:
    """Shapes on a canvas twice as large as what is seen of it."""
    random = np.random.default_rng(seed)
    width, height = size
    canvas = Image.new("RGB", (2 * width, 2 * height), (90, 120, 100))
    pen = ImageDraw.Draw(canvas)
    for _ in range(120):
        x, y, radius = int(random.integers(2 * width)), int(random.integers(2 * height)), int(random.integers(5, 60))
        colour = tuple(int(value) for value in random.integers(0, 255, 3))
        draw = pen.ellipse if random.random() < 0.5 else pen.rectangle
        draw((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return canvas


def view(canvas: Image.Image, size: tuple[int, int], right: float = 0, down: float = 0, zoom: float = 1) -> Image.Image:
    """The middle of a canvas, zoomed about its centre and then moved by so many pixels."""
    width, height = size
    x, y = width - right / zoom, height - down / zoom
    half = width / zoom / 2, height / zoom / 2
    box = (x - half[0], y - half[1], x + half[0], y + half[1])
    return canvas.transform(size, Image.Transform.EXTENT, box, Image.Resampling.BICUBIC)


@pytest.mark.parametrize("seed", range(8))
def test_shift_and_zoom_are_found(seed):
    size = SIZES[seed % len(SIZES)]
    random = np.random.default_rng(seed)
    right, down = float(random.integers(-20, 21)), float(random.integers(-12, 13))
    zoom = float(np.round(random.uniform(0.93, 1.07), 2))
    canvas = scene(seed, size)
    drift = drift_between(view(canvas, size), view(canvas, size, right, down, zoom))
    assert drift.down == pytest.approx(down / size[1], abs=0.004)
    assert drift.right == pytest.approx(right / size[0], abs=0.004)
    assert drift.zoom == pytest.approx(zoom, abs=0.011)
    assert drift.is_certain


def test_an_edit_in_place_has_not_drifted():
    size = (320, 240)
    control = view(scene(3, size), size)
    edited = control.copy()
    ImageDraw.Draw(edited).ellipse((60, 60, 150, 150), fill=(255, 0, 0))
    drift = drift_between(control, edited)
    assert (drift.down, drift.right, drift.zoom) == (pytest.approx(0, abs=1e-3), pytest.approx(0, abs=1e-3), 1.0)
    assert drift.is_certain


def test_what_moves_inside_the_mask_is_no_drift():
    """Two thirds of the picture are replaced by a moved copy; the mask says so."""
    size = (300, 300)
    canvas = scene(5, size)
    control, moved = view(canvas, size), view(canvas, size, right=18, down=9)
    output = control.copy()
    output.paste(moved.crop((0, 0, 300, 200)), (0, 0))
    mask = np.zeros((30, 30), dtype=np.float32)
    mask[:20] = 1
    assert abs(drift_between(control, output).right) == pytest.approx(18 / 300, abs=0.004)
    drift = drift_between(control, output, mask)
    assert drift.down == pytest.approx(0, abs=2e-3)
    assert drift.right == pytest.approx(0, abs=2e-3)


def test_images_that_have_nothing_in_common_give_no_certain_answer():
    size = (256, 256)
    drift = drift_between(view(scene(1, size), size), Image.effect_noise(size, 90).convert("RGB"))
    assert not drift.is_certain


def test_nothing_to_compare_is_no_drift():
    flat, textured = Image.new("RGB", (128, 96), "grey"), view(scene(2, (128, 96)), (128, 96))
    assert drift_between(flat, textured) is None
    assert drift_between(textured, textured, np.ones((6, 8), dtype=np.float32)) is None
