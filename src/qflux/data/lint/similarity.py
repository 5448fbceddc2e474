"""How images look beside each other: copies, pairs that do not fit, edits that go the wrong way.

Everything is computed from thumbnails. What it finds is a suspicion, and is worded like one.

Shapes: n samples, S = 16 the side of a kept thumbnail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float32]

KEPT = 16
"""Side of the thumbnails that are compared with each other."""

_COPY = 3.0
"""Mean difference, of 255, up to which two images count as copies."""
_LOCAL = 20.0
"""The same for their most different spot: a small edit is not a copy."""
MOST_PAIRS = 20_000
"""Pairs compared with each other; beyond that a comparison of all with all takes minutes."""
_MOST_NEIGHBOURS = 500


def thumbnail(image: Image.Image) -> NDArray[np.uint8]:
    """`(S, S, 3)`"""
    return np.asarray(image.resize((KEPT, KEPT), Image.Resampling.BOX), dtype=np.uint8)


def features(image: Image.Image) -> Floats:
    """`(6,)` in [0, 1]: mean red, green, blue, saturation, contrast, edges."""
    pixels = np.asarray(image, dtype=np.float32) / 255
    grey = pixels.mean(-1)
    edges = np.abs(np.diff(grey, axis=0)).mean() + np.abs(np.diff(grey, axis=1)).mean()
    saturation = (pixels.max(-1) - pixels.min(-1)).mean()
    return np.array([*pixels.mean((0, 1)), saturation, grey.std(), edges], dtype=np.float32)


def copies(thumbnails: Sequence[NDArray[np.uint8]]) -> list[list[int]]:
    """Groups of images that look the same. Flat images look alike without being copies, and are left out."""
    vectors = np.stack(thumbnails).reshape(len(thumbnails), -1).astype(np.float32)
    textured = np.flatnonzero(vectors.reshape(len(vectors), -1, 3).std(1).max(1) > 4)
    order = textured[np.argsort(vectors[textured].mean(1), kind="stable")]
    means = vectors[order].mean(1)
    group_of: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for position, index in enumerate(map(int, order)):
        # Copies have almost the same mean, so only neighbours need a look, and of those the nearest.
        end = min(int(np.searchsorted(means, means[position] + _COPY, side="right")), position + _MOST_NEIGHBOURS)
        others = order[position + 1 : end]
        differences = np.abs(vectors[others] - vectors[index])
        group = group_of.setdefault(index, index)
        for other in map(int, others[(differences.mean(1) <= _COPY) & (differences.max(1) <= _LOCAL)]):
            if other not in group_of:
                group_of[other] = group
                groups.setdefault(group, [group]).append(other)
    return [sorted(members) for members in groups.values()]


def crossed(controls: Sequence[NDArray[np.uint8]], targets: Sequence[NDArray[np.uint8]]) -> Iterator[tuple[int, int]]:
    """(i, j): the control of i is far more like the target of j than like its own."""
    count = min(len(controls), MOST_PAIRS)
    first, second = _normalised(controls[:count]), _normalised(targets[:count])
    own = (first * second).sum(1)
    textured = np.minimum(_spread(controls[:count]), _spread(targets[:count])) > 4
    for start in range(0, count, 1024):
        alike = first[start : start + 1024] @ second.T
        best = alike.argmax(1)
        for offset, other in enumerate(best):
            index = start + offset
            score = float(alike[offset, other])
            better = score > 0.8 and score - own[index] > 0.3
            if other != index and better and second[other] @ second[index] < 0.9 and textured[[index, other]].all():
                yield index, int(other)


def _spread(thumbnails: Sequence[NDArray[np.uint8]]) -> Floats:
    """`(n,)` how far the grey values of each thumbnail spread; flat ones have no pattern to compare."""
    return np.stack(thumbnails).astype(np.float32).mean(-1).reshape(len(thumbnails), -1).std(1)


def _normalised(thumbnails: Sequence[NDArray[np.uint8]]) -> Floats:
    """`(n, S * S)` grey, mean 0, length 1."""
    grey = np.stack(thumbnails).astype(np.float32).mean(-1).reshape(len(thumbnails), -1)
    grey -= grey.mean(1, keepdims=True)
    return (grey / np.maximum(np.linalg.norm(grey, axis=1, keepdims=True), 1e-6)).astype(np.float32)


def reversed_edits(controls: Sequence[Floats], targets: Sequence[Floats]) -> list[int]:
    """Samples whose edit goes against the direction that nearly all others share: control and target may be swapped.

    If the edits of a data set have no common direction, nothing can be said, and nothing is.
    """
    if len(controls) < 8:
        return []
    change = np.stack(targets) - np.stack(controls)
    middle = np.median(change, axis=0)
    agreement = (np.sign(change) == np.sign(middle)).mean(0)
    common = (np.abs(middle) > 0.02) & (agreement >= 0.9)
    if not common.any():
        return []
    relative = (change[:, common] / middle[common]).clip(-2, 2).mean(1)
    return [int(index) for index in np.flatnonzero(relative < -0.5)]
