"""From an image's own size to its training size: which area, which height and width, which crop.

A size is `(height, width)` in pixels, both multiples of a step (16, or what a family says). An image is never
squeezed: it covers its size, and the remainder of less than one step is cropped (`resize` stretches and `padding` adds
borders for those who ask for it).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from PIL import Image

from qflux.config import STEP, ProcessorSettings
from qflux.errors import DataError, cut
from qflux.models.registry import size_presets

Size = tuple[int, int]
"""`(height, width)` in pixels."""
Box = tuple[int, int, int, int]
"""Left, top, right and bottom in pixels."""

AskedSize = Size | Literal["input"] | None
"""What somebody wants of a result's size; nothing: what the preprocessing makes of the image to edit."""

DEFAULT_AREA = 1024 * 1024
MOST_PIXELS, MOST_SIDE = 4096 * 4096, 8192
FILL = 0.9
"""The least share of an area's token budget that a size should use."""


@dataclass(frozen=True)
class Transform:
    """How one image reaches its size. `key` names everything the result depends on besides the image."""

    size: Size
    fit: str
    """crop, stretch, pad, cut or mirror."""
    step: int = field(default=STEP, compare=False, repr=False)
    """What sizes are multiples of: less than that is lost to a crop without a word."""
    inner: Size | None = None
    """What an image is resized to before it is cut, in the middle, pixel by pixel, or surrounded by its reflection."""

    @property
    def key(self) -> str:
        height, width = self.size
        inner = f":{self.inner[0]}x{self.inner[1]}" if self.inner else ""
        return f"{self.fit}:{height}x{width}{inner}:lanczos"

    @property
    def kept(self) -> Box | None:
        """Left, top, right and bottom of an image in its own reflection; none if nothing is around it."""
        if self.fit != "mirror" or self.inner is None or self.inner == self.size:
            return None
        (rows, columns), (height, width) = self.inner, self.size
        left, top = (width - columns) // 2, (height - rows) // 2
        return left, top, left + columns, top + rows

    def crops(self, width: int, height: int) -> bool:
        """More than the remainder of one step is cut off an image of this size."""
        if self.fit == "cut" and self.inner is not None:
            return any(inner - side >= self.step for inner, side in zip(self.inner, self.size, strict=True))
        rows, columns = (side / self.step for side in self.size)
        return self.fit == "crop" and abs(columns - rows * width / height) >= 1 <= abs(rows - columns * height / width)

    def enlarges(self, width: int, height: int) -> bool:
        """An image of this size gets more pixels than it has."""
        rows, columns = self.size
        scales = columns / width, rows / height
        return (min(scales) if self.fit == "pad" else max(scales)) > 1

    def aligned(self, width: int, height: int) -> Transform:
        """The same for an image of this size that shows what the transform's own image shows.

        Only one that cuts pixel by pixel depends on the size: the other image covers what is cut, and is cut alike.
        """
        if self.fit != "cut" or self.inner is None or self.inner == (height, width):
            return self
        scale = max(self.inner[1] / width, self.inner[0] / height)
        return replace(self, inner=(round(height * scale), round(width * scale)))

    def __call__(self, image: Image.Image, fill: str = "white") -> Image.Image:
        height, width = self.size
        if image.size == (width, height):
            return image
        if self.fit == "stretch":
            return image.resize((width, height), Image.Resampling.LANCZOS)
        if self.inner is not None:
            if image.size != self.inner[::-1]:
                image = image.resize(self.inner[::-1], Image.Resampling.LANCZOS)
            if self.fit == "mirror":
                return _mirrored(image, self)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            return image.crop((left, top, left + width, top + height))
        if self.fit == "pad":
            scale = min(width / image.width, height / image.height)
            inner = image.resize(
                (max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.LANCZOS
            )
            nothing = (255, 255, 255, 0) if image.mode == "RGBA" else fill
            canvas = Image.new(image.mode, (width, height), nothing)
            canvas.paste(inner, ((width - inner.width) // 2, (height - inner.height) // 2))
            return canvas
        # Cover and crop in one resampling.
        return image.resize((width, height), Image.Resampling.LANCZOS, box=self.box(*image.size))

    def box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of what is kept of an image of this size.

        When cropping it is the largest centred part with the aspect ratio of the result.
        """
        if self.fit not in ("crop", "cut"):
            return 0.0, 0.0, float(width), float(height)
        rows, columns = self.size
        if self.inner is not None:
            down, across = height / self.inner[0], width / self.inner[1]
            left, top = (self.inner[1] - columns) // 2 * across, (self.inner[0] - rows) // 2 * down
            return left, top, left + columns * across, top + rows * down
        scale = min(width / columns, height / rows)
        left, top = max(0.0, width - columns * scale) / 2, max(0.0, height - rows * scale) / 2
        return left, top, min(width, left + columns * scale), min(height, top + rows * scale)


def _mirrored(image: Image.Image, transform: Transform) -> Image.Image:
    if transform.kept is None:
        return image
    left, top, right, bottom = transform.kept
    rows, columns = transform.size
    edges = ((top, rows - bottom), (left, columns - right), *([(0, 0)] if len(image.getbands()) > 1 else []))
    # A reflection leaves out the edge itself; what is smaller than a step has no other pixels to spare.
    mode: Literal["reflect", "symmetric"] = "reflect" if min(image.size) > transform.step else "symmetric"
    return Image.fromarray(np.pad(np.asarray(image), edges, mode=mode))


_Choice = Size | str | list[int]
"""A fixed size, a preset, or candidate areas."""


class ImageProcessor:
    """Chooses the transform of every image of a sample from the images' own sizes."""

    def __init__(self, settings: ProcessorSettings | None = None, step: int = STEP) -> None:
        self.settings = settings or ProcessorSettings()
        self.step = step
        self.fit = {"resize": "stretch", "padding": "pad"}.get(self.settings.process_type, "crop")

    def target(self, width: int, height: int, name: str = "image") -> Transform:
        """The transform of a target of this size; its mask shares it, and its first control unless it has its own."""
        self.check_aspect(width, height, name)
        return self._transform(self._of_target(), width, height)

    def control(
        self, index: int, width: int, height: int, target: Transform | None = None, name: str = "control"
    ) -> Transform:
        """The transform of control `index` from 0, the image to edit.

        That one shares its `target`'s transform, so that both are cut alike, unless another size is configured for it.
        Every further control is sized on its own.
        """
        self.check_aspect(width, height, name)
        chosen = self._of_control(index)
        aligned = index == 0 and target is not None and self.settings.controls == "target"
        if aligned and target is not None and chosen in (None, self._of_target()):
            return target.aligned(width, height)
        return self._transform(chosen or self._of_target(), width, height)

    def _of_target(self) -> _Choice:
        """What the settings say of targets, by precedence."""
        settings = self.settings
        if settings.target_size:
            return settings.target_size
        candidates = settings.multi_resolutions
        if candidates:
            return candidates.preset or list(candidates.target)
        return [settings.target_pixels or DEFAULT_AREA]

    def _of_control(self, index: int) -> _Choice | None:
        """What the settings say of a control, if anything."""
        settings = self.settings
        if settings.controls_size and index < len(settings.controls_size):
            return settings.controls_size[index]
        candidates = None if settings.target_size else settings.multi_resolutions
        if candidates and index < len(candidates.controls):
            return list(candidates.controls[index])
        pixels = settings.controls_pixels
        if isinstance(pixels, list):
            pixels = pixels[index] if index < len(pixels) else None
        return [pixels] if pixels else None

    def _transform(self, choice: _Choice, width: int, height: int) -> Transform:
        if isinstance(choice, tuple):
            size = choice
        elif isinstance(choice, str):
            size = closest_aspect(size_presets()[choice], width, height)
        else:
            size = best_size([int(area) for area in choice], width, height, self.step)
        transform = Transform(size, self.fit, self.step)
        if self.settings.enlarge or isinstance(choice, tuple) or not transform.enlarges(width, height):
            return transform
        size = max(height // self.step, 1) * self.step, max(width // self.step, 1) * self.step
        if self.fit != "crop" or min(width, height) < self.step:
            return Transform(size, self.fit, self.step)
        return Transform(size, "cut", self.step, inner=(height, width))

    def check_aspect(self, width: int, height: int, name: str) -> None:
        """An error if the image is longer than `max_aspect_ratio` allows."""
        ratio, most = max(width / height, height / width), self.settings.max_aspect_ratio
        if most is not None and ratio > most:
            raise DataError(
                f"{name} is {width}x{height}: its aspect ratio {ratio:.2f} is beyond max_aspect_ratio {most:g}",
                "raise data.processor.max_aspect_ratio.",
            )


def asked_size(text: str) -> AskedSize:
    """A size as people write it: `input`, or HEIGHTxWIDTH such as 768x1024."""
    if text.strip().lower() == "input":
        return "input"
    match = re.fullmatch(r"\s*(\d{1,5})\s*[x*×]\s*(\d{1,5})\s*", text)
    if not match:
        raise DataError(f"the size {cut(text)} is neither 'input' nor HEIGHTxWIDTH", "for example 768x1024.")
    return int(match[1]), int(match[2])


def possible_size(size: Size, step: int = STEP) -> Size:
    """The size, if a model can make an image of it; otherwise an error."""
    if any(side < step or side % step for side in size):
        raise DataError(f"the size {size[0]}x{size[1]} is not possible", f"use multiples of {step} pixels.")
    if size[0] * size[1] > MOST_PIXELS or max(size) > MOST_SIDE:
        raise DataError(f"the size {size[0]}x{size[1]} is beyond anything the models know", "use at most 4096x4096.")
    return size


def best_size(areas: Sequence[int], width: int, height: int, step: int = STEP) -> Size:
    """The size for an image, from the candidate area nearest to its own.

    Nearest is the smallest `|A - w h| / (w h)`; then the smaller area; then the better aspect ratio.
    """
    own = width * height
    area = min(
        areas,
        key=lambda a: (abs(a - own) / own, a, _aspect_error(size_for_area(a, width, height, step), width, height)),
    )
    return size_for_area(area, width, height, step)


@lru_cache(maxsize=4096)
def size_for_area(area: int, width: int, height: int, step: int = STEP) -> Size:
    """The size within an area's token budget that keeps the image's aspect ratio best.

    Only sizes that leave less than one step to crop are considered. Of those that use at least nine tenths of the
    budget the one with the best aspect ratio wins, then the larger one; where none uses that much, the largest.
    """
    budget = max(1, area // step**2)
    ratio = width / height
    grids = {
        (rows, columns)
        for short in range(1, math.isqrt(budget) + 1)
        for rows, columns in _grids_with_short_side(short, ratio)
        if rows * columns <= budget
    } or {(1, 1)}
    full = [grid for grid in grids if grid[0] * grid[1] >= FILL * budget]
    if full:
        rows, columns = min(full, key=lambda g: (_aspect_error(g, width, height), -g[0] * g[1], g))
    else:
        rows, columns = min(grids, key=lambda g: (-g[0] * g[1], _aspect_error(g, width, height), g))
    return rows * step, columns * step


def _grids_with_short_side(short: int, ratio: float) -> list[tuple[int, int]]:
    """(rows, columns) whose shorter side is `short` and whose longer side is within a step of the exact one."""
    long = short * max(ratio, 1 / ratio)
    sides = {max(1, math.floor(long)), math.ceil(long)}
    return [(short, side) if ratio >= 1 else (side, short) for side in sides]


def closest_aspect(sizes: Sequence[Size], width: int, height: int) -> Size:
    """The size whose aspect ratio differs least, the rule of diffusers' pipelines with a list of sizes."""
    return min(sizes, key=lambda size: (abs(width / height - size[1] / size[0]), size[1], size[0]))


def _aspect_error(size: tuple[int, int], width: int, height: int) -> float:
    return abs(math.log((size[1] / size[0]) / (width / height)))
