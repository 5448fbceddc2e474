"""Synthetic data sets of several sizes and aspect ratios: recolour the shape, with one and two controls and masks; or,
for models that edit nothing, paint it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from qflux.data.sources.folder import CONTROLS, TARGETS

SIZES = ((192, 192), (256, 144), (144, 256), (224, 160), (128, 128), (320, 128), (176, 208), (256, 256))
"""(width, height) of the scenes."""
SHAPES = ("circle", "square", "triangle", "star")
COLOURS = {
    "red": (208, 48, 40),
    "green": (46, 150, 70),
    "blue": (44, 92, 200),
    "yellow": (236, 190, 44),
    "purple": (132, 66, 170),
}


def write_data_set(root: Path, count: int = 24, seed: int = 0, edits: bool = True) -> None:
    """Write `count` samples in the folder layout of `qflux.data.sources`. Equal seeds give equal files.

    Every third sample takes the new colour from a second control instead of naming it; every second one has a mask.
    Without `edits` there are neither controls nor masks, and the prompt describes the picture.
    """
    rng = random.Random(seed)
    for folder in (TARGETS, CONTROLS):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for index in range(count):
        base = f"scene_{index:03d}"
        shape = rng.choice(SHAPES)
        before, after = rng.sample(sorted(COLOURS), 2)
        size = SIZES[index % len(SIZES)]
        scene = _Scene(size, shape, rng)
        scene.paint(COLOURS[after]).save(root / TARGETS / f"{base}.png")
        if not edits:
            (root / TARGETS / f"{base}.txt").write_text(f"a {after} {shape} on soft stripes\n", encoding="utf-8")
            continue
        scene.paint(COLOURS[before]).save(root / CONTROLS / f"{base}.png")
        prompt = f"make the {shape} {after}"
        if index % 3 == 2:
            prompt = f"give the {shape} the colour of the second image"
            swatch = Image.new("RGB", rng.choice([(96, 96), (160, 64), (64, 128)]), COLOURS[after])
            swatch.save(root / CONTROLS / f"{base}_control_1.png")
        if index % 2 == 0:
            scene.mask().save(root / CONTROLS / f"{base}_mask.png")
        (root / TARGETS / f"{base}.txt").write_text(prompt + "\n", encoding="utf-8")


class _Scene:
    """A shape on a textured background; painting it in two colours gives an aligned pair."""

    def __init__(self, size: tuple[int, int], shape: str, rng: random.Random) -> None:
        width, height = size
        self._background = _texture(width, height, rng)
        radius = min(size) * rng.uniform(0.24, 0.36)
        centre = (rng.uniform(radius, width - radius), rng.uniform(radius, height - radius))
        self._outline = _outline(shape, centre, radius, rng.uniform(0, math.pi))

    def paint(self, colour: tuple[int, int, int]) -> Image.Image:
        image = self._background.copy()
        image.paste(Image.new("RGB", image.size, colour), mask=self.mask())
        return image

    def mask(self) -> Image.Image:
        large = Image.new("L", (self._background.width * 4, self._background.height * 4), 0)
        ImageDraw.Draw(large).polygon([(4 * x, 4 * y) for x, y in self._outline], fill=255)
        return large.resize(self._background.size, Image.Resampling.BOX)


def _texture(width: int, height: int, rng: random.Random) -> Image.Image:
    """Soft stripes in two muted colours."""
    y, x = np.mgrid[0:height, 0:width]
    angle, period = rng.uniform(0, math.pi), rng.uniform(18, 46)
    wave = 0.5 + 0.5 * np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period)
    first, second = (np.array([rng.uniform(150, 235) for _ in range(3)]) for _ in range(2))
    pixels = wave[..., None] * first + (1 - wave[..., None]) * second
    return Image.fromarray(pixels.round().astype(np.uint8))


def _outline(shape: str, centre: tuple[float, float], radius: float, turn: float) -> list[tuple[float, float]]:
    corners = {"circle": 72, "square": 4, "triangle": 3, "star": 10}[shape]
    return [
        (
            centre[0] + (radius if shape != "star" or corner % 2 == 0 else radius * 0.45) * math.cos(angle),
            centre[1] + (radius if shape != "star" or corner % 2 == 0 else radius * 0.45) * math.sin(angle),
        )
        for corner in range(corners)
        for angle in [turn + 2 * math.pi * corner / corners]
    ]
