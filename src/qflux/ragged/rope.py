"""Rotary positions for a ragged batch: computed once per step, handed to every block.

Shapes: T joint tokens, H heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from qflux.ragged.layout import ImageShape

Rotary = tuple[Tensor, Tensor]
"""Cosines and signed sines, each `(T, 1, D)` float32; see `rotary_tables`."""


@lru_cache(maxsize=256)
def _grid(rows: int, columns: int) -> Tensor:
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3).float()


def image_ids(img_shapes: Sequence[Sequence[ImageShape]], device: torch.device | str | None = None) -> Tensor:
    """Position ids `(N, 3)` = (domain, row, column) of all images of a batch, in token order.

    The domain of a target is 0, that of control k is k.
    """
    ids = []
    for shapes in img_shapes:
        for domain, (_, rows, columns) in enumerate(shapes):
            grid = _grid(rows, columns)
            ids.append(torch.cat([grid.new_full((len(grid), 1), domain), grid[:, 1:]], dim=1))
    return torch.cat(ids).to(device, non_blocking=True)


def rotary_tables(cos: Tensor, sin: Tensor) -> Rotary:
    """What `rotate` needs, from cosines and sines `(T, D)` that hold an angle for each channel, pairs sharing one.

    A pair (a, b) turns into (a cos - b sin, b cos + a sin): each channel times its cosine, plus its neighbour times a
    sine that is negative for the first of the two.
    """
    sign = torch.tensor([-1.0, 1.0], device=sin.device).repeat(sin.shape[-1] // 2)
    return cos[:, None, :], (sin * sign)[:, None, :]


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn neighbouring channel pairs of `x` `(T, H, D)` by the positions' angles, in float32."""
    cos, signed_sin = rotary
    neighbour = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cos).addcmul(neighbour.to(cos.dtype), signed_sin).to(x.dtype)
