"""How far an edit has moved what it should have left alone: shift and zoom of the output against its control.

The edges of both images are compared by phase correlation, at several zooms; the mask's region is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]

SIDE = 256
"""The longer side at which images are compared."""
ZOOMS = np.round(np.arange(0.90, 1.1001, 0.01), 2)
LEAST_REGION = 0.05
"""The share of the image that must be outside the mask."""


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
    grey = np.asarray(image.convert("L"), dtype=np.float64)
    down, right = np.gradient(grey)
    strength = np.hypot(down, right)
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
