"""The demo's data set: scenes by day and by night, an edit that the base model does not know."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from qflux.data.images.pixels import to_image
from qflux.data.sources.folder import CONTROLS, TARGETS
from qflux.demo.instructions import SIZES, SMALL_SIZES, TO_LIT_NIGHT, TO_NIGHT
from qflux.demo.scenes import COLOURS, dimmed, draw_scene, render, render_night, swatch
from qflux.files.atomic import new_folder
from qflux.pictures.drawing import write_png

SAMPLES = 152
"""Pairs of the demo."""


def write_night_set(root: Path, count: int, seed: int) -> None:
    """Write `count` pairs of all sizes in qflux's folder layout. Equal seeds give equal files.

    Every third one takes the colour of its light from a second picture.
    """
    rng = random.Random(seed)
    for index in range(count):
        name = f"scene_{index:03d}"
        scene = draw_scene(rng, *SIZES[index % len(SIZES)])
        prompt, lights = TO_NIGHT, None
        if index % 3 == 2:
            colour = rng.choice([colour for colour in COLOURS if colour != "black"])
            prompt, lights = TO_LIT_NIGHT, [dimmed(COLOURS[colour])]
            second = swatch(rng, *rng.choice(SMALL_SIZES), colour)
            _write(root / CONTROLS / f"{name}_control_1.png", render([second]))
        _write(root / CONTROLS / f"{name}.png", render([scene]))
        _write(root / TARGETS / f"{name}.png", render_night([scene], lights))
        (root / TARGETS / f"{name}.txt").write_text(f"{prompt}\n", encoding="utf-8")


def ensure_night_set(root: Path) -> None:
    """The demo's pairs in a folder, unless it is there already."""
    if not root.exists():
        with new_folder(root) as folder:
            write_night_set(folder, SAMPLES, seed=0)


def _write(path: Path, pictures: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        write_png(path, to_image(pictures[0] * 2 - 1))
