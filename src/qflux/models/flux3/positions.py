"""FLUX.3's position ids: time, row, column, and place in the text, on which references have negative numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from qflux.ragged.shapes import ImageShape, Shapes
from qflux.ragged.transfer import upload

SCALE = 0.5
"""Rows and columns are this far apart."""


def target_ids(shapes: Sequence[Shapes], device: torch.device | str | None = None) -> Tensor:
    """Position ids `(M, 4)` of the targets of a batch, in token order."""
    return upload(torch.cat([_grid(shape, 0) for sample in shapes for shape in sample.targets]), device)


def control_ids(shapes: Sequence[Shapes], device: torch.device | str | None = None) -> Tensor:
    """Position ids `(K, 4)` of the controls of a batch, in token order: the first of a sample has the place -1."""
    grids = [_grid(shape, -number) for sample in shapes for number, shape in enumerate(sample.controls, start=1)]
    return upload(torch.cat([torch.zeros(0, 4), *grids]), device)


@lru_cache(maxsize=256)
def _grid(shape: ImageShape, place: int) -> Tensor:
    _, rows, columns = shape
    axes = ([0], [SCALE * row for row in range(rows)], [SCALE * column for column in range(columns)], [place])
    return torch.cartesian_prod(*(torch.tensor(axis).float() for axis in axes))
