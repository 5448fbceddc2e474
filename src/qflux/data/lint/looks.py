"""Every image of a data set decoded once, small: what that shows of each sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qflux.data.images.decode import ImageRef, load_mask, load_small
from qflux.data.images.index import in_parallel
from qflux.data.lint import similarity
from qflux.data.lint.alignment import THUMBNAIL, Shift, shift_between
from qflux.data.lint.registration import Registration, measured
from qflux.data.sample import Sample
from qflux.errors import DataError

_CLOSELY, _SIDE = 500, 384
"""So many pairs are looked at closely, spread over all, at a longer side of so many pixels."""


@dataclass
class Look:
    """What decoding a sample's images showed."""

    damaged: list[DataError] = field(default_factory=list)
    target: Any = None
    control: Any = None
    target_features: Any = None
    control_features: Any = None
    shift: Shift | None = None
    registration: Registration | None = None
    mask: tuple[float, float] | None = None
    """Least and most of a mask, in [0, 1]."""


def look_at(samples: Sequence[Sample], report: Callable[[int, int], None]) -> list[Look]:
    """A look at each sample; `report` is told how many are done, of how many."""
    closely = {id(sample) for sample in samples[:: -(-len(samples) // _CLOSELY) or 1]}
    looks: list[Look] = []
    # A thread a core: they compute, and more of them would only wait for each other.
    for look in in_parallel(lambda sample: _look(sample, id(sample) in closely), samples, os.cpu_count() or 1):
        looks.append(look)
        report(len(looks), len(samples))
    return looks


def _look(sample: Sample, closely: bool) -> Look:
    look, images = Look(), sample.own_images
    small = [_small(image.ref, look) for image in images.all]
    if small[0] is not None:
        look.target, look.target_features = similarity.thumbnail(small[0]), similarity.features(small[0])
    if len(small) > 1 and small[1] is not None:
        look.control, look.control_features = similarity.thumbnail(small[1]), similarity.features(small[1])
        if small[0] is not None:
            look.shift = shift_between(small[1], small[0])
            look.registration = measured(sample, _SIDE) if closely and not look.shift.is_suspect else None
    if images.mask:
        try:
            values = np.asarray(load_mask(images.mask)) / 255
            look.mask = float(values.min()), float(values.max())
        except DataError as error:
            look.damaged.append(error)
    return look


def _small(ref: ImageRef, look: Look) -> Any:
    try:
        return load_small(ref, THUMBNAIL)
    except DataError as error:
        look.damaged.append(error)
        return None
