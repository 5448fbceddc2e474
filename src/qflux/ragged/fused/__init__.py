"""What a block does to tokens between its matrix products, in one pass over memory each: Triton, on a GPU.

A block in plain torch goes over its tokens about thirty times between matrix products; with 35 000 tokens of 3 072
channels that is a quarter of the time of a step. The functions of `modulation`, `heads` and `mlp` take these kernels
where `ready` allows: for sampling. Those of heads have a gradient (`turned`), and are for training too. Kernels round
where the operations they replace round; the two products around a GELU do not: one rounds once less, the other once
more.

Shapes: T tokens, R rows of conditioning, C channels, H heads, D channels of a head.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from qflux.ragged.recomputed.unread import LastLinear

if TYPE_CHECKING:
    from qflux.ragged.fused.turned import HeadNorm

HAS_TRITON = find_spec("triton") is not None

if HAS_TRITON:
    from qflux.ragged.fused import kernels


def possible(tokens: Tensor) -> bool:
    """Whether there are kernels for `tokens`: half precision on a GPU."""
    return (
        HAS_TRITON
        and tokens.is_cuda
        and tokens.dtype in (torch.bfloat16, torch.float16)
        and not torch.is_autocast_enabled("cuda")
    )


def ready(tokens: Tensor) -> bool:
    """Whether `tokens` can take the way of sampling: nothing differentiated, nothing compiled."""
    return possible(tokens) and len(tokens) > 0 and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def is_plain(linear: nn.Module, tokens: Tensor) -> TypeGuard[nn.Linear]:
    """Whether `linear` is a matrix product and nothing else: no adapter, no quantization, no hook."""
    return (
        type(linear) in (nn.Linear, LastLinear)
        and type(linear.weight.data) is Tensor
        and linear.bias is not None
        and linear.weight.dtype == tokens.dtype
        and "forward" not in vars(linear)
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def norm_modulate(tokens: Tensor, eps: float, scale: Tensor, shift: Tensor | None, row: Tensor) -> Tensor:
    """`layer_norm(tokens) * (1 + scale) + shift` of `(T, C)`, with scale and shift `(R, C)` of each token's row."""
    tokens = tokens.contiguous()
    out = torch.empty_like(tokens)
    width = tokens.shape[1]
    kernels.norm_modulate[(len(tokens),)](
        tokens,
        scale,
        shift,
        row,
        out,
        eps,
        scale.stride(0),
        0 if shift is None else shift.stride(0),
        width,
        _power_of_2(width),
        num_warps=8,
    )
    return out


def add_gated(tokens: Tensor, gate: Tensor, update: Tensor, row: Tensor) -> Tensor:
    """`tokens + gate * update` of `(T, C)`, with the gate `(R, C)` of each token's row."""
    tokens, update = tokens.contiguous(), update.contiguous()
    out = torch.empty_like(tokens)
    width = tokens.shape[1]
    kernels.add_gated[(len(tokens),)](
        tokens, gate, update, row, out, gate.stride(0), width, _power_of_2(width), num_warps=8
    )
    return out


def place_heads(
    out: Tensor,
    x: Tensor,
    rows: Tensor | None = None,
    norm: HeadNorm | None = None,
    rotary: Tensor | None = None,
    exact: bool = False,
) -> None:
    """Write `x` `(T, H, D)` to `rows` of `out`, normalised per head, then turned by the positions of those rows.

    With `exact`, nothing is rounded in between.
    """
    count, heads, width = x.shape
    x = _heads_in_order(x)
    if count:
        kernels.place_heads[(count,)](
            x,
            out,
            rows,
            norm.weight if norm else None,
            rotary,
            norm.eps if norm else 0.0,
            x.stride(0),
            heads,
            width,
            _power_of_2(heads),
            norm is not None,
            norm is not None and norm.rounds_first,
            exact,
            num_warps=4,
        )


def turned_gradient(
    grad: Tensor, x: Tensor, rows: Tensor | None, weight: Tensor | None, rotary: Tensor, eps: float
) -> Tensor:
    """The gradient of what `place_heads` took, given that of what it wrote."""
    count, heads, width = x.shape
    grad, x = grad.contiguous(), _heads_in_order(x)
    out = x.new_empty(x.shape)
    block = min(_power_of_2(heads), 8)
    if count:
        kernels.turned_gradient[(count, -(-heads // block))](
            grad, x, out, rows, weight, rotary, eps, x.stride(0), heads, width, block, num_warps=4
        )
    return out


def _heads_in_order(x: Tensor) -> Tensor:
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def gelu_linear(linear: nn.Linear, tokens: Tensor) -> Tensor:
    """`gelu(linear(tokens))`, the tanh approximation, applied where the product still is in registers."""
    return torch._addmm_activation(linear.bias, tokens, linear.weight.t(), use_gelu=True)


def linear_of_two(linear: nn.Linear, first: Tensor, second: Tensor) -> Tensor:
    """`linear(cat([first, second]))` without the concatenation."""
    left, right = linear.weight.t().split([first.shape[1], second.shape[1]])
    return torch.addmm(linear.bias, first, left).addmm_(second, right)


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
