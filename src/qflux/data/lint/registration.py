"""How a target lies against its control, to a fraction of a pixel, and the pair brought into register.

A pair that is shifted or zoomed by a little teaches just that. What is looked for is `target(c + zoom (x - c) + shift)
= control(x)` for most of the picture: Gauss-Newton steps from coarse to fine, on lightness that may have another gain
and offset, with weights that leave out whatever does not fit, which is the edit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qflux.data.images.decode import load_rgb
from qflux.data.sample import Sample
from qflux.errors import DataError
from qflux.measures.colour import lab
from qflux.measures.edit import edited_region

Floats = NDArray[np.float64]

SIDE = 768
"""The longer side at which pairs are compared."""
_LEVELS = (8, 4, 2, 1)
_STEPS = 12
_NOISE = 1.0
"""Steps of lightness, of 255: less than that is no difference."""
_EARNED = 0.9
"""Of what is left without moving anything: a movement has to leave less."""
_EDGE = 0.06
"""Of a side: what lies there is left out, because it may have no counterpart."""
_LEAST_FIT = 0.75
"""The likeness of edges from which a pair is believed to show the same scene."""
_NOTICED, _NOTICED_ZOOM = 0.25, 0.0008
"""In pixels, and as a change of scale: what is less is not worth a resampling."""


@dataclass(frozen=True)
class Registration:
    """Where a target's content lies against its control's."""

    down: float
    """In pixels of the target."""
    right: float
    zoom: float
    """Above 1: things are larger in the target."""
    fit: float
    """How alike edges are once this is undone: 1 is the same picture."""
    cast: tuple[float, float, float]
    """By how much lightness, red and yellow differ outside of what was edited, in Lab."""

    @property
    def is_off(self) -> bool:
        """Far enough to be worth undoing."""
        return max(abs(self.down), abs(self.right)) > _NOTICED or abs(self.zoom - 1) > _NOTICED_ZOOM

    @property
    def has_cast(self) -> bool:
        """A difference of colours that can be seen."""
        return math.hypot(*self.cast) > 2.0

    def reach(self, width: int, height: int) -> float:
        """How far a point is off at most, in pixels of an image of this size."""
        return max(
            math.hypot(self.right + x * (self.zoom - 1) * width / 2, self.down + y * (self.zoom - 1) * height / 2)
            for x in (-1, 1)
            for y in (-1, 1)
        )


def register(control: Image.Image, target: Image.Image, side: int = SIDE) -> Registration | None:
    """The registration of two images of one size; none if they do not show the same scene, or too little of it.

    They are compared at a longer side of `side` pixels.
    """
    scale = min(1.0, side / max(target.size))
    size = max(32, round(target.width * scale)), max(32, round(target.height * scale))
    first, second = (_lightness(image, size) for image in (control, target))
    found = _search(first, second)
    scale_x, scale_y = size[0] / target.width, size[1] / target.height
    fit = _likeness(first, _warped(second, found))
    if fit < _LEAST_FIT:
        return None
    zoom, right, down = float(1 + found[0]), float(found[1] / scale_x), float(found[2] / scale_y)
    undone = Registration(down, right, zoom, fit, (0.0, 0.0, 0.0))
    small = registered(target, undone).resize(size, Image.Resampling.BOX)
    return Registration(down, right, zoom, fit, _cast(control.resize(size, Image.Resampling.BOX), small))


def measured(sample: Sample, side: int = SIDE) -> Registration | None:
    """How the target of a sample lies against its first control; none if that can't be told."""
    try:
        pair = loaded_pair(sample)
    except DataError:
        return None
    return None if pair is None else register(*pair, side)


def loaded_pair(sample: Sample) -> tuple[Image.Image, Image.Image] | None:
    """The first control and the target of a sample, if they are of one size."""
    images = sample.own_images
    if not images.controls or images.controls[0].facts.size != images.target.facts.size:
        return None
    return load_rgb(images.controls[0].ref), load_rgb(images.target.ref)


def registered(target: Image.Image, found: Registration) -> Image.Image:
    """The target moved to where its control is; what comes from beyond its border repeats the border."""
    pixels = np.asarray(target, dtype=np.float64)
    channels = pixels[..., None] if pixels.ndim == 2 else pixels
    shift = np.array([found.zoom - 1, found.right, found.down])
    moved = np.stack([_warped(channels[..., number], shift) for number in range(channels.shape[-1])], axis=-1)
    return Image.fromarray(np.clip(moved.round(), 0, 255).astype(np.uint8).reshape(pixels.shape))


def covered(size: tuple[int, int], found: Registration) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of what a registered target has pixels of its own for, in an image of this size."""
    sides = []
    for length, shift in ((size[0], found.right), (size[1], found.down)):
        centre = (length - 1) / 2
        first, last = ((edge - shift - centre) / found.zoom + centre for edge in (0, length - 1))
        sides.append((max(0, math.ceil(first - 1e-6)), min(length, math.floor(last + 1e-6) + 1)))
    (left, right), (top, bottom) = sides
    return left, top, right, bottom


def _search(first: Floats, second: Floats) -> Floats:
    """From coarse to fine; zoom - 1, right and down. What explains no more than standing still is no movement."""
    still = np.zeros(3)
    found = still
    for level in _LEVELS:
        if min(first.shape) // level < 24:
            continue
        control, target = _shrunk(first, level), _shrunk(second, level)
        scale = np.array([1.0, level, level])
        starts = [found] if found is still else [found, still]
        refined = [scale * _refined(control, target, start / scale) for start in starts]
        found = _cheapest(control, target, [found, *refined], scale)
    return _cheapest(first, second, [still, found], np.ones(3), _EARNED)


def _cheapest(control: Floats, target: Floats, ways: Sequence[Floats], scale: Floats, earned: float = 1.0) -> Floats:
    """The movement that leaves least, robustly; another than the first must leave less than `earned` of it."""
    inside = _inside(control)
    rests = []
    for way in ways:
        moved = _warped(target, way / scale)[inside]
        gain, offset = _line(moved, control[inside])
        rests.append(control[inside] - gain * moved - offset)
    spread = 2.5 * max(_NOISE, min(map(_spread, rests)))
    squares = [rest**2 for rest in rests]
    costs = [float((square / (square + spread**2)).mean()) for square in squares]
    costs = [cost if abs(way[0]) < 0.1 else math.inf for cost, way in zip(costs, ways, strict=True)]
    best = int(np.argmin(costs))
    return ways[best] if costs[best] < earned * costs[0] else ways[0]


def _inside(image: Floats) -> NDArray[np.bool_]:
    """Without the border, which may have no counterpart."""
    inside = np.zeros(image.shape, dtype=bool)
    edge = max(2, round(_EDGE * max(image.shape)))
    inside[edge:-edge, edge:-edge] = True
    return inside


def _refined(control: Floats, target: Floats, start: Floats) -> Floats:
    """Gauss-Newton steps from a start; the last good place if they lead nowhere."""
    inside = _inside(control)
    wanted = control[inside]
    if len(wanted) < 100:
        return start
    y, x = (places - (side - 1) / 2 for places, side in zip(np.nonzero(inside), control.shape, strict=True))
    found = start.copy()
    design, weight = np.ones((5, len(wanted))), None
    for _ in range(_STEPS):
        moved = _warped(target, found)
        down, right = np.array(np.gradient(moved))[:, inside]
        values = moved[inside]
        gain, offset = _line(values, wanted) if weight is None else _weighted_line(values, wanted, weight)
        rest = wanted - gain * values - offset
        weight = _trust(rest)
        design[:4] = right * x + down * y, right, down, values
        design[:3] *= gain
        weighted = design * weight
        normal = weighted @ design.T
        try:
            step = np.linalg.solve(normal + 1e-9 * np.trace(normal) * np.eye(5), weighted @ rest)
        except np.linalg.LinAlgError:
            return found
        step = step[:3]
        if not np.isfinite(step).all() or np.abs(step[1:]).max() > 0.25 * min(control.shape):
            return found
        # The step is in the frame of what was moved already: it goes before that.
        found = np.array([(1 + found[0]) * (1 + step[0]) - 1, *(found[1:] + (1 + found[0]) * step[1:])])
        if np.abs(step[1:]).max() < 1e-3 and abs(step[0]) * max(control.shape) < 2e-3:
            break
    return found


def _line(values: Floats, wanted: Floats) -> tuple[float, float]:
    """Gain and offset that bring most values to the wanted ones, whatever a minority of them does."""
    weight = np.ones_like(values)
    for _ in range(3):
        gain, offset = _weighted_line(values, wanted, weight)
        weight = _trust(wanted - gain * values - offset)
    return _weighted_line(values, wanted, weight)


def _weighted_line(values: Floats, wanted: Floats, weight: Floats) -> tuple[float, float]:
    total = weight.sum()
    mean, goal = float(weight @ values / total), float(weight @ wanted / total)
    centred = values - mean
    weighted = weight * centred
    gain = float(weighted @ (wanted - goal) / max(weighted @ centred, 1e-9 * total))
    return gain, goal - gain * mean


def _trust(rest: Floats) -> Floats:
    """The weight of each value by what is left of it: nearly nothing for those that do not fit."""
    share = rest / (2.5 * max(_spread(rest), _NOISE))
    share *= share
    share += 1
    share *= share
    result: Floats = np.reciprocal(share, out=share)
    return result


def _spread(rest: Floats) -> float:
    """The standard deviation of most values, whatever the others are."""
    middle = len(rest) // 2
    return 1.4826 * float(np.partition(np.abs(rest), middle)[middle])


def _warped(image: Floats, found: Floats) -> Floats:
    """`image(c + zoom (x - c) + shift)`, cubic in both directions, which a zoom without a turn allows."""
    zoom, right, down = 1 + found[0], found[1], found[2]
    across = _resampled(image, zoom, down)
    result: Floats = _resampled(across.T, zoom, right).T
    return result


def _resampled(image: Floats, zoom: float, shift: float) -> Floats:
    """The rows of an image at other places, by Catmull-Rom's cubic."""
    count = len(image)
    centre = (count - 1) / 2
    place = centre + zoom * (np.arange(count) - centre) + shift
    first = np.floor(place).astype(int)
    t = (place - first)[:, None]
    weights: tuple[Any, ...] = (
        ((-0.5 * t + 1.0) * t - 0.5) * t,
        (1.5 * t - 2.5) * t * t + 1.0,
        ((-1.5 * t + 2.0) * t + 0.5) * t,
        (0.5 * t - 0.5) * t * t,
    )
    result: Floats = np.zeros_like(image)
    for offset, weight in zip((-1, 0, 1, 2), weights, strict=True):
        tap = image[np.clip(first + offset, 0, count - 1)]
        tap *= weight
        result += tap
    return result


def _lightness(image: Image.Image, size: tuple[int, int]) -> Floats:
    """Grey, a little softened: what is finer than a pixel would be taken for a movement, and so would rounding."""
    grey = np.asarray(image.convert("RGB"), dtype=np.float32) @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    if image.size != size:
        grey = np.asarray(Image.fromarray(grey).resize(size, Image.Resampling.LANCZOS))
    return _softened(_softened(grey.astype(np.float64)).T).T


def _softened(image: Floats) -> Floats:
    """Along its columns, by a binomial filter of about a pixel."""
    padded = np.pad(image, ((2, 2), (0, 0)), mode="edge")
    taps = [weight / 16 * padded[place : place + len(image)] for place, weight in enumerate((1, 4, 6, 4, 1))]
    result: Floats = np.sum(taps, axis=0)
    return result


def _shrunk(image: Floats, by: int) -> Floats:
    rows, columns = (side // by * by for side in image.shape)
    # Centres stay centres: what does not divide is cut off on both sides.
    top, left = (image.shape[0] - rows) // 2, (image.shape[1] - columns) // 2
    whole = image[top : top + rows, left : left + columns]
    result: Floats = whole.reshape(rows // by, by, columns // by, by).mean(axis=(1, 3))
    return result


def _likeness(first: Floats, second: Floats) -> float:
    """The correlation of the edges of two images, over the half of the picture where they fit best."""
    edge = max(2, round(_EDGE * max(first.shape)))
    inner = (slice(edge, -edge), slice(edge, -edge))
    parts = [np.array(np.gradient(each))[(slice(None), *inner)] for each in (first, second)]
    a, b = (each / max(float(np.sqrt((each**2).mean())), 1e-9) for each in parts)
    rest = ((a - b) ** 2).sum(axis=0)
    kept = rest <= np.quantile(rest, 0.7)
    together = float((a * b).sum(axis=0)[kept].sum())
    size = math.sqrt(float((a**2).sum(axis=0)[kept].sum()) * float((b**2).sum(axis=0)[kept].sum()))
    return together / size if size > 1e-9 else 0.0


def _cast(control: Image.Image, target: Image.Image) -> tuple[float, float, float]:
    """The middle difference of colours where edges and a border are left out, and the edited region if it is small."""
    before, after = lab(control), lab(target)
    moved = (after - before).reshape(-1, 3)
    region = edited_region(before, after, None)
    outside = np.ones(len(moved), dtype=bool) if region is None or region.mean() > 0.6 else ~region.reshape(-1)
    lightness, red, yellow = np.median(moved[outside], axis=0)
    return float(lightness), float(red), float(yellow)
