"""FLUX.2's position ids: which image a token is of, its row, its column, and its place in the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from qflux.ragged.shapes import ImageShape, Shapes
from qflux.ragged.transfer import upload

STEP = 10
"""Between the image numbers of one control and the next; the first control has this number, a target has 0."""


def image_ids(shapes: Sequence[Shapes], device: torch.device | str | None = None) -> Tensor:
    """Position ids `(N, 4)` = (image, row, column, 0) of all images of a batch, in token order."""
    ids = []
    for sample in shapes:
        ids += [_grid(shape, 0) for shape in sample.targets]
        ids += [_grid(shape, STEP * number) for number, shape in enumerate(sample.controls, start=1)]
    return upload(torch.cat(ids), device)


def text_ids(lengths: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Position ids `(L, 4)` = (0, 0, 0, place) of all prompts of a batch."""
    places = torch.cat([torch.arange(length) for length in lengths]).float()
    return upload(torch.stack([torch.zeros_like(places)] * 3 + [places], dim=1), device)


@lru_cache(maxsize=256)
def _grid(shape: ImageShape, number: int) -> Tensor:
    _, rows, columns = shape
    return torch.cartesian_prod(*(torch.tensor(axis).float() for axis in ([number], range(rows), range(columns), [0])))
