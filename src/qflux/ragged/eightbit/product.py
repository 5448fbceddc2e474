"""Products of 8-bit rows with an 8-bit weight.

The weight is kept once. A GPU multiplies rows by rows: forward, by those of the weight as it lies; backward, by those
of the weight turned, which is turned anew each time. Its scales are of its outputs, so that backward they are a factor
of the gradient's channels, applied before those are rounded.

Shapes: T tokens, I channels in, O channels out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qflux.ragged import fused
from qflux.ragged.recomputed.unread import is_left_out

if fused.HAS_TRITON:
    from qflux.ragged.eightbit import kernels

_ONES: dict[tuple[torch.device, int], Tensor] = {}


# Operators of their own: compiled code takes them as they are, asks when it runs whether a product is wanted
# (`recomputed.unread`), and does not compile anew when sizes change.
@torch.library.custom_op("qflux::eight_bit_product", mutates_args=())
def product(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    is_last: bool,
) -> Tensor:
    """`rows` `(T, I)` times `weight` `(O, I)`, in `dtype`; with scales `(T,)` and `(O,)`, and a bias `(O,)`."""
    if len(rows) == 0 or (is_last and is_left_out()):
        return _empty(rows, weight, dtype)
    if rows.is_cuda and rows.dtype == torch.int8:
        return kernels.int8_product(rows, scale, weight, weight_scale, bias, dtype)
    if rows.is_cuda and not any(size % 16 for size in weight.shape):
        out = torch._scaled_mm(
            rows,
            weight.t(),
            scale[:, None],
            (_ones(weight) if weight_scale is None else weight_scale)[None],
            bias if bias is None else bias.bfloat16(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out.to(dtype)
    exact = torch._int_mm(rows, weight.t()).float() if rows.dtype == torch.int8 else rows.float() @ weight.float().t()
    out = exact * scale[:, None]
    if weight_scale is not None:
        out = out * weight_scale
    return (out if bias is None else out + bias).to(dtype)


@product.register_fake
def _(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    is_last: bool,
) -> Tensor:
    return _empty(rows, weight, dtype)


@torch.library.custom_op("qflux::turned", mutates_args=())
def turned(weight: Tensor) -> Tensor:
    """`(O, I)` as `(I, O)`, its rows where its columns were in memory too."""
    if weight.is_cuda:
        return kernels.turned(weight)
    return weight.t().contiguous()


@turned.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape[1], weight.shape[0])


def _empty(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=dtype)


def _ones(weight: Tensor) -> Tensor:
    key = weight.device, len(weight)
    if key not in _ONES:
        _ONES[key] = torch.ones(len(weight), device=weight.device)
    return _ONES[key]
