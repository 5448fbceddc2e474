"""How two images of a scene lie against each other, by correlation of their edges.

`shift_between` is a quick look at thumbnails: does a pair of a data set fit better when one of them is moved?
`drift_between` measures an edit: shift and zoom of the output against its control, to a fraction of a pixel, with the
mask's region left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]

SIDE = 256
"""The longer side at which images are compared."""
ZOOMS = np.round(np.arange(0.90, 1.1001, 0.01), 2)
LEAST_REGION = 0.05
"""The share of the image that must be outside the mask."""


THUMBNAIL = 64
"""Side of the thumbnails that pairs of a data set are aligned on."""


@dataclass(frozen=True)
class Shift:
    """How far a target has moved against its control, in parts of its sides, and how like they are before and after."""

    down: float
    right: float
    likeness: float
    likeness_shifted: float

    @property
    def is_suspect(self) -> bool:
        """They fit clearly better when one of them is moved."""
        moved = max(abs(self.down), abs(self.right)) >= 2 / THUMBNAIL
        return moved and self.likeness_shifted > 0.6 and self.likeness_shifted - self.likeness > 0.25


def shift_between(control: Image.Image, target: Image.Image) -> Shift:
    """The displacement at which two images of the same size look most alike."""
    first, second = _normalised_edges(control), _normalised_edges(target)
    correlation = np.fft.irfft2(np.conj(np.fft.rfft2(first)) * np.fft.rfft2(second), s=first.shape)
    down, right = np.unravel_index(int(correlation.argmax()), correlation.shape)
    rows, columns = correlation.shape
    return Shift(
        _centred(int(down), rows) / rows,
        _centred(int(right), columns) / columns,
        float(correlation[0, 0]),
        float(correlation[int(down), int(right)]),
    )


def _normalised_edges(image: Image.Image) -> NDArray[np.float32]:
    """Edge strength, with mean 0 and length 1; flat images have none."""
    strength = _edge_strength(np.asarray(image.convert("L"), dtype=np.float32))
    strength -= strength.mean()
    return (strength / max(float(np.linalg.norm(strength)), 1e-6)).astype(np.float32)


def _edge_strength(grey: NDArray[Any]) -> NDArray[Any]:
    down, right = np.gradient(grey)
    return np.hypot(down, right)


def _centred(place: int, count: int) -> int:
    """A place on a circle of `count`, as a displacement from 0 in either direction."""
    return (place + count // 2) % count - count // 2


@dataclass(frozen=True)
class Drift:
    """Displacement of the output in parts of the image's height and width, its zoom, and how sure that is (0 to 1)."""

    down: float
    right: float
    zoom: float
    confidence: float

    @property
    def is_certain(self) -> bool:
        """Images that have nothing in common stay below 0.05, the same scene moved is above 0.3."""
        return self.confidence >= 0.1

    def line(self) -> dict[str, float]:
        """As the log of a run has it."""
        return {
            "down": round(self.down, 4),
            "right": round(self.right, 4),
            "zoom": self.zoom,
            "confidence": round(self.confidence, 3),
        }

    @property
    def distance(self) -> float:
        """How far a point moves at most, about: the shift, and the zoom's effect halfway to the border."""
        return float(np.hypot(self.down, self.right)) + abs(self.zoom - 1) / 4


def drift_between(control: Image.Image, output: Image.Image, mask: NDArray[np.float32] | None = None) -> Drift | None:
    """Where the output's content lies against the control's; nothing if there is too little to compare.

    Args:
        control, output: of the same aspect ratio.
        mask: `(rows, columns)` of any size, 1 where the edit may change anything.
    """
    scale = SIDE / max(control.size)
    size = max(16, round(control.width * scale)), max(16, round(control.height * scale))
    region = _region(mask, size)
    if region.mean() < LEAST_REGION:
        return None
    reference = _edges(control.resize(size, Image.Resampling.BILINEAR), region)
    if reference is None:
        return None
    spectrum = np.conj(np.fft.rfft2(reference))
    best: Drift | None = None
    # Zooms near 1 come first: of equals the plainer explanation wins.
    for zoom in sorted(map(float, ZOOMS), key=lambda value: abs(value - 1)):
        moved = _edges(_zoomed(output, size, zoom), region)
        if moved is None:
            continue
        found = _peak(spectrum * np.fft.rfft2(moved), (size[1], size[0]), zoom)
        if best is None or found.confidence > best.confidence * 1.02:
            best = found
    return best


def _peak(cross: NDArray[np.complex128], shape: tuple[int, int], zoom: float) -> Drift:
    """The displacement at which the spectra's phases agree, to a fraction of a pixel."""
    # Half whitened: pure phase makes noise as loud as edges, pure correlation makes blur as loud as position.
    correlation = np.fft.irfft2(cross / np.maximum(np.sqrt(np.abs(cross)), 1e-12), s=shape)
    row, column = np.unravel_index(int(correlation.argmax()), shape)
    # Found after the zoom was undone, told as it is in the output.
    down = zoom * _refined(correlation[:, column], int(row)) / shape[0]
    right = zoom * _refined(correlation[row], int(column)) / shape[1]
    energy = float(np.sqrt(np.square(correlation).sum()))
    return Drift(down, right, zoom, float(correlation[row, column]) / max(energy, 1e-12))


def _refined(line: Floats, index: int) -> float:
    """The place of a peak between samples, by a parabola through its neighbours; the line is a circle."""
    count = len(line)
    before, here, after = (float(line[(index + offset) % count]) for offset in (-1, 0, 1))
    bend = before - 2 * here + after
    offset = 0.5 * (before - after) / bend if bend else 0.0
    return (index + offset + count / 2) % count - count / 2


def _zoomed(image: Image.Image, size: tuple[int, int], zoom: float) -> Image.Image:
    """The image at `size`, with a zoom by `zoom` about its centre undone."""
    width, height = image.size
    box = (
        width / 2 - width * zoom / 2,
        height / 2 - height * zoom / 2,
        width / 2 + width * zoom / 2,
        height / 2 + height * zoom / 2,
    )
    return image.convert("L").transform(size, Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)


def _edges(image: Image.Image, region: Floats) -> Floats | None:
    """Edge strength within the region, mean 0; nothing if the image is flat there."""
    strength = _edge_strength(np.asarray(image.convert("L"), dtype=np.float64))
    mean = float((strength * region).sum() / region.sum())
    edges: Floats = (strength - mean) * region
    return edges if float(np.abs(edges).max()) > 1.0 else None


def _region(mask: NDArray[np.float32] | None, size: tuple[int, int]) -> Floats:
    """1 outside the mask, fading to 0 at the image's border, where zooming leaves nothing to compare."""
    width, height = size
    window: Floats = np.outer(_fade(height), _fade(width))
    if mask is None:
        return window
    grey = Image.fromarray((np.clip(mask, 0, 1) * 255).astype(np.uint8))
    inside = np.asarray(grey.resize(size, Image.Resampling.BILINEAR), dtype=np.float64) / 255
    return window * (1 - inside)


def _fade(count: int) -> Floats:
    edge = max(1, count // 8)
    ramp = np.minimum(np.arange(count), np.arange(count)[::-1]) / edge
    return np.clip(ramp, 0, 1)
