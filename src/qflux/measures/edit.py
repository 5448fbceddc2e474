"""One edit against what it was made from and what was wanted.

    outside_colour   how far colours outside the edited region are from the control's (CIEDE2000; 1 is just visible)
    outside_ssim     how alike its structure is there (1: the same)
    cast             the mean of what colours there have moved by, in Lab
    blur             of the whole picture against the wanted one: the sigma of a Gaussian, in pixels
    done             how much of the way from the control to the wanted image, inside the region

All images are compared as the VAE returns them where that is known, so that its losses are not the LoRA's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from qflux.measures.colour import Floats, difference, lab
from qflux.measures.structure import blur, similarity

Region = NDArray[np.bool_]

LEAST_SHARE = 0.05
"""Of an image that has to be on a side of the region for that side to be measured."""
_CHANGED = 5.0
"""CIEDE2000 from which a place counts as changed, where nobody has drawn a mask."""
_NEAREST = Image.Resampling.NEAREST
_MARGIN = 0.02
"""Of the longer side: what is so close to a changed place belongs to it."""


@dataclass(frozen=True)
class EditMeasures:
    """Of one edit; what could not be measured is None."""

    outside_colour: float | None = None
    outside_ssim: float | None = None
    cast: float | None = None
    """The length of the mean colour change outside the region."""
    cast_lab: tuple[float, float, float] | None = None
    """The same in lightness, red and yellow."""
    blur: float | None = None
    vae_blur: float | None = None
    """What the VAE alone does to the wanted image, in the same measure."""
    done: float | None = None
    perceptual: dict[str, float] | None = None
    """How alike networks find it and the wanted image (or the control), where somebody has such networks."""

    def line(self) -> dict[str, Any]:
        """What is known of it, for a file."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        found |= found.pop("perceptual", {})
        return {name: np.round(value, 4).tolist() for name, value in found.items()}


MEANS = ("outside_colour", "outside_ssim", "cast", "blur", "done")
"""What is averaged over edits."""


def means(measured: list[EditMeasures]) -> dict[str, float | None]:
    """Of each measure over the edits that have it."""
    known = {name: [getattr(each, name) for each in measured if getattr(each, name) is not None] for name in MEANS}
    return {name: fmean(values) if values else None for name, values in known.items()}


def perceptual_means(measured: list[EditMeasures]) -> dict[str, float]:
    """The same of what networks say, by their names."""
    found: dict[str, list[float]] = {}
    for each in measured:
        for name, value in (each.perceptual or {}).items():
            found.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def measure(
    output: Image.Image,
    control: Image.Image | None = None,
    wanted: Image.Image | None = None,
    mask: NDArray[np.float32] | None = None,
    original: Image.Image | None = None,
) -> EditMeasures:
    """Measure an edit. Images of another size than the output's are left out.

    Args:
        original: the wanted image before the VAE.
        mask: `(rows, columns)` of any size, 1 where the edit may change anything. Without one, the region is where
            control and wanted image differ.
    """
    control, wanted = (
        image if image is not None and image.size == output.size else None for image in (control, wanted)
    )
    seen = lab(output)
    before, goal = (None if image is None else lab(image) for image in (control, wanted))
    region = edited_region(before, goal, mask)
    found: dict[str, Any] = {}
    if goal is not None:
        found["blur"] = blur(_grey(seen), _grey(goal))
        if original is not None and original.size == output.size:
            found["vae_blur"] = blur(_grey(goal), _grey(lab(original)))
    if region is None or before is None:
        return EditMeasures(**found)
    outside = ~region
    if outside.mean() >= LEAST_SHARE:
        found["outside_colour"] = float(difference(before, seen)[outside].mean())
        moved = (seen - before)[outside].mean(axis=0)
        found |= {"cast": float(np.linalg.norm(moved)), "cast_lab": tuple(map(float, moved))}
        alike = similarity(_grey(before), _grey(seen), outside)
        found["outside_ssim"] = float(alike.mean()) if len(alike) else None
    if goal is not None and region.mean() > 0:
        whole = float(difference(before, goal)[region].mean())
        left = float(difference(seen, goal)[region].mean())
        found["done"] = 1 - left / whole if whole > 1 else None
    return EditMeasures(**found)


def edited_region(before: Floats | None, goal: Floats | None, mask: NDArray[np.float32] | None) -> Region | None:
    """Where an edit may change something: the mask, or where two images in Lab differ, with a margin.

    None if there is neither; all of the image is a region, too.
    """
    known = before if before is not None else goal
    if known is None:
        return None
    rows, columns = known.shape[:2]
    if mask is not None:
        drawn = Image.fromarray((np.clip(mask, 0, 1) * 255).astype(np.uint8)).resize((columns, rows), _NEAREST)
        return np.asarray(drawn) > 127
    if before is None or goal is None:
        return None
    return widened(difference(before, goal) > _CHANGED, max(1, round(_MARGIN * max(rows, columns))))


def widened(region: Region, by: int) -> Region:
    """With everything within so many pixels; single pixels, which noise makes, are left out first."""
    image = Image.fromarray(region.astype(np.uint8) * 255)
    cleaned = image.filter(ImageFilter.MedianFilter(5))
    return np.asarray(cleaned.filter(ImageFilter.MaxFilter(2 * by + 1))) > 127


def _grey(values: Floats) -> Floats:
    """Lightness on a scale of 0 to 255."""
    return values[..., 0] * 2.55
