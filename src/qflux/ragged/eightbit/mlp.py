"""Two frozen layers around a GELU in 8 bits: what lies between their products is gone over once.

Shapes: T tokens, C channels, H hidden channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qflux.ragged import fused
from qflux.ragged.eightbit.linear import EightBitLinear
from qflux.ragged.eightbit.product import product, turned
from qflux.ragged.eightbit.rows import LARGEST, SMALLEST, Rows, has_kernels, in_rows, in_rows_once
from qflux.ragged.recomputed.unread import is_left_out

if fused.HAS_TRITON:
    from qflux.ragged.eightbit import kernels


def gelu_mlp(up: EightBitLinear, down: EightBitLinear, tokens: Tensor, beside: Tensor | None = None) -> Tensor:
    """`down(gelu(up(tokens)))`, tanh-approximated; with `beside` `(T, C2)`, `down(cat([beside, gelu(up(tokens))]))`."""
    if not torch.is_grad_enabled():
        hidden = product(*in_rows_once(tokens, up.weight.dtype), up.weight, up.scale, up.bias, tokens.dtype, False)
        rows = gelu_rows(hidden, beside, down.weight.dtype, False)
        return product(*rows, down.weight, down.scale, down.bias, tokens.dtype, False)
    layers = up.weight, up.scale, up.bias, down.weight, down.scale, down.bias
    out: Tensor = _GeluMlp.apply(tokens, beside, down.is_last, *layers)
    return out


class _GeluMlp(torch.autograd.Function):
    """Keeps the hidden values as they were before the GELU."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, beside: Tensor | None, is_last: bool, *layers: Any) -> Tensor:
        up, up_scale, up_bias, down, down_scale, down_bias = layers
        hidden = product(*in_rows(tokens, up.dtype), up, up_scale, up_bias, tokens.dtype, False)
        ctx.save_for_backward(hidden, up, up_scale, down, down_scale)
        ctx.beside = 0 if beside is None else beside.shape[1]
        rows = gelu_rows(hidden, beside, down.dtype, is_last)
        return product(*rows, down, down_scale, down_bias, tokens.dtype, is_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, up, up_scale, down, down_scale = ctx.saved_tensors
        rows, columns = in_rows(grad, down.dtype, down_scale), turned(down)
        beside = product(*rows, columns[: ctx.beside], None, None, grad.dtype, False) if ctx.beside else None
        of_gelu = product(*rows, columns[ctx.beside :], None, None, grad.dtype, False)
        of_hidden = gelu_gradient_rows(of_gelu, hidden, up_scale, up.dtype)
        return product(*of_hidden, turned(up), None, None, grad.dtype, False), beside, *(None,) * 7


@torch.library.custom_op("qflux::gelu_rows", mutates_args=())
def gelu_rows(hidden: Tensor, beside: Tensor | None, dtype: torch.dtype, is_last: bool) -> tuple[Tensor, Tensor]:
    """`cat([beside, gelu(hidden)])` in 8-bit rows; nothing if it is for a product that is left out."""
    if is_last and is_left_out():
        return _empty(hidden, beside, dtype)
    if has_kernels(hidden):
        return kernels.gelu_rows(hidden, beside, dtype, LARGEST[dtype], SMALLEST)
    values = F.gelu(hidden.float(), approximate="tanh")
    return in_rows(values if beside is None else torch.cat([beside.float(), values], dim=1), dtype)


@gelu_rows.register_fake
def _(hidden: Tensor, beside: Tensor | None, dtype: torch.dtype, is_last: bool) -> tuple[Tensor, Tensor]:
    return _empty(hidden, beside, dtype)


@torch.library.custom_op("qflux::gelu_gradient_rows", mutates_args=())
def gelu_gradient_rows(grad: Tensor, hidden: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient `(T, H)` of what a GELU took, given that of what it gave, times a factor `(H,)`: 8-bit rows."""
    if has_kernels(hidden):
        return kernels.gelu_gradient_rows(grad, hidden, factor, dtype, LARGEST[dtype], SMALLEST)
    x = hidden.float()
    slope = math.sqrt(8 / math.pi)
    gate = torch.sigmoid(slope * (x + 0.044715 * x**3))  # gelu(x) = x * gate
    own = gate + x * gate * (1 - gate) * slope * (1 + 3 * 0.044715 * x**2)
    return in_rows(grad.float() * own, dtype, factor)


@gelu_gradient_rows.register_fake
def _(grad: Tensor, hidden: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty(hidden, None, dtype)


def _empty(hidden: Tensor, beside: Tensor | None, dtype: torch.dtype) -> Rows:
    width = hidden.shape[1] + (0 if beside is None else beside.shape[1])
    return hidden.new_empty(hidden.shape[0], width, dtype=dtype), hidden.new_empty(hidden.shape[0], dtype=torch.float32)
