"""Rotary positions for a ragged batch: computed once per step, handed to every block.

Shapes: T joint tokens, H heads, D channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Rotary = Tensor
"""`(T, 1, D / 2, 2)` float32: cosine and sine of every channel pair of every token, the same for all heads."""


def rotary_from(cos: Tensor, sin: Tensor) -> Rotary:
    """From cosines and sines `(T, D)` float32 that hold every angle twice in a row, as diffusers makes them."""
    return torch.stack([cos[:, ::2], sin[:, ::2]], dim=-1)[:, None]


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn neighbouring channel pairs of `x` `(T, H, D)` by the positions' angles, in float32."""
    return _Rotate.apply(x, rotary)


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing of `x` is kept, and both ways cost the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotary: Tensor) -> Tensor:
        ctx.save_for_backward(rotary)
        return _turn(x, rotary)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rotary,) = ctx.saved_tensors
        return _turn(grad, rotary, back=True), None


def _turn(x: Tensor, rotary: Rotary, back: bool = False) -> Tensor:
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # The product below in real numbers: inductor fuses it with its neighbours, and can't do so with complex ones.
        cos, sin = rotary.unbind(-1)
        sin = -sin if back else sin
        real, imaginary = pairs.unbind(-1)
        turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    else:
        turn = torch.view_as_complex(rotary)
        turned = torch.view_as_real(torch.view_as_complex(pairs) * (turn.conj() if back else turn))
    return turned.flatten(-2).to(x.dtype)
