"""FLUX Kontext's position ids: which image a token is of, its row and its column."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from qflux.ragged.shapes import Shapes
from qflux.ragged.transfer import upload


def image_ids(shapes: Sequence[Shapes], device: torch.device | str | None = None) -> Tensor:
    """Position ids `(N, 3)` = (image, row, column) of all images of a batch, in token order.

    The image number of a target is 0, that of control k, counted from 1, is k.
    """
    ids = []
    for sample in shapes:
        numbered = [(0, shape) for shape in sample.targets] + list(enumerate(sample.controls, start=1))
        for number, (_, rows, columns) in numbered:
            grid = _grid(rows, columns)
            ids.append(torch.cat([grid.new_full((len(grid), 1), number), grid[:, 1:]], dim=1))
    return upload(torch.cat(ids), device)


@lru_cache(maxsize=256)
def _grid(rows: int, columns: int) -> Tensor:
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3).float()
