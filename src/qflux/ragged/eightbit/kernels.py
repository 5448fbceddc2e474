"""What a GPU does around products in 8 bits, and the product of integers with their scales: Triton."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store_row(value, out, scale, row, smallest, LARGEST: tl.constexpr, inside, column, width, WHOLE: tl.constexpr):
    # What is not finite makes the scale NaN.
    own = tl.maximum(tl.max(tl.abs(value)) / LARGEST, smallest) + tl.sum(value - value)
    tl.store(scale + row, own)
    tl.store(out + row * width + column, _rounded(value, own, WHOLE).to(out.dtype.element_ty), inside)


@triton.jit
def _rounded(value, own, WHOLE: tl.constexpr):
    value = value * (1.0 / own)
    return tl.extra.cuda.libdevice.rint(value) if WHOLE else value


@triton.jit
def _values(x, factor, inside, column):
    value = tl.load(x + column, inside, 0.0).to(tl.float32)
    if factor is not None:
        value *= tl.load(factor + column, inside, 0.0)
    return value


@triton.jit
def _in_rows(x, factor, out, scale, stride, width, smallest, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = _values(x + row * stride, factor, column < width, column)
    _store_row(value, out, scale, row, smallest, LARGEST, column < width, column, width, WHOLE)


@triton.jit
def _in_long_rows(x, factor, out, scale, stride, width, smallest, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    odd = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _values(x + row * stride, factor, column < width, column)
        most = tl.maximum(most, tl.abs(value))
        odd += value - value
    own = tl.maximum(tl.max(most) / LARGEST, smallest) + tl.sum(odd)
    tl.store(scale + row, own)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _rounded(_values(x + row * stride, factor, column < width, column), own, WHOLE)
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), column < width)


LONG = 16384
"""Wider rows do not fit into registers: they are read twice."""


def in_rows(x, dtype, factor, largest, smallest):
    """`rows.in_rows` in one kernel; rows of up to `LONG` channels are read once."""
    x = x if x.stride(1) == 1 else x.contiguous()
    count, width = x.shape
    out = torch.empty(count, width, dtype=dtype, device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    kernel, block = (_in_long_rows, 4096) if width > LONG else (_in_rows, triton.next_power_of_2(width))
    if count:
        kernel[(count,)](
            x, factor, out, scale, x.stride(0), width, smallest, largest, dtype == torch.int8, block,
            num_warps=4 if kernel is _in_rows and block <= 4096 else 8,
        )  # fmt: skip
    return out, scale


@triton.jit
def _gelu_gate(x):
    # gelu(x) = x * gate, in the tanh approximation
    return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gelu_rows(
    hidden, beside, out, scale, besides, width, smallest,
    LARGEST: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    own = column >= besides
    value = tl.load(hidden + row * (width - besides) + column - besides, inside & own, 0.0).to(tl.float32)
    value *= _gelu_gate(value)
    if beside is not None:
        value += tl.load(beside + row * besides + column, column < besides, 0.0).to(tl.float32)
    _store_row(value, out, scale, row, smallest, LARGEST, inside, column, width, WHOLE)


def gelu_rows(hidden, beside, dtype, largest, smallest):
    """`mlp.gelu_rows`, a row at a time in registers."""
    hidden, beside = hidden.contiguous(), beside if beside is None else beside.contiguous()
    besides = 0 if beside is None else beside.shape[1]
    count, width = len(hidden), hidden.shape[1] + besides
    out = torch.empty(count, width, dtype=dtype, device=hidden.device)
    scale = torch.empty(count, dtype=torch.float32, device=hidden.device)
    if count:
        _gelu_rows[(count,)](
            hidden, beside, out, scale, besides, width, smallest, largest, dtype == torch.int8,
            triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
    return out, scale


@triton.jit
def _gelu_gradient_rows(
    grad, hidden, factor, out, scale, width, smallest,
    LARGEST: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(hidden + row * width + column, inside, 0.0).to(tl.float32)
    gate = _gelu_gate(x)
    slope = gate + x * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * x * x)
    value = slope * tl.load(grad + row * width + column, inside, 0.0).to(tl.float32)
    value *= tl.load(factor + column, inside, 0.0)
    _store_row(value, out, scale, row, smallest, LARGEST, inside, column, width, WHOLE)


def gelu_gradient_rows(grad, hidden, factor, dtype, largest, smallest):
    """`mlp.gelu_gradient_rows`, a row at a time in registers."""
    grad, hidden = grad.contiguous(), hidden.contiguous()
    count, width = hidden.shape
    out = torch.empty(count, width, dtype=dtype, device=hidden.device)
    scale = torch.empty(count, dtype=torch.float32, device=hidden.device)
    if count:
        _gelu_gradient_rows[(count,)](
            grad, hidden, factor, out, scale, width, smallest, largest, dtype == torch.int8,
            triton.next_power_of_2(width), num_warps=16,
        )  # fmt: skip
    return out, scale


@triton.jit
def _turned(x, out, height, width, BLOCK: tl.constexpr):
    down = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    right = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (down < height)[:, None] & (right < width)[None, :]
    tile = tl.load(x + down[:, None] * width + right[None, :], inside, 0)
    tl.store(out + right[:, None] * height + down[None, :], tl.trans(tile), tl.trans(inside))


def turned(weight):
    """`product.turned`."""
    height, width = weight.shape
    out = torch.empty(width, height, dtype=weight.dtype, device=weight.device)
    grid = triton.cdiv(height, 128), triton.cdiv(width, 128)
    _turned[grid](weight.view(torch.int8), out.view(torch.int8), height, width, 128, num_warps=8)
    return out


@triton.jit
def _int8_product(
    rows, scale, weight, weight_scale, bias, out, tokens, width, depth,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs of a group share columns of the weight while those are in the cache.
    number = tl.program_id(0)
    downs, rights = tl.cdiv(tokens, M), tl.cdiv(width, N)
    group = number // (GROUP * rights)
    first = group * GROUP
    height = min(downs - first, GROUP)
    down = (first + number % (GROUP * rights) % height) * M + tl.arange(0, M)
    right = (number % (GROUP * rights) // height) * N + tl.arange(0, N)
    along = tl.arange(0, K)
    left_at = rows + (down % tokens).to(tl.int64)[:, None] * depth + along[None, :]
    right_at = weight + (right % width).to(tl.int64)[None, :] * depth + along[:, None]
    total = tl.zeros([M, N], tl.int32)
    for start in range(0, depth, K):
        inside = along < depth - start
        left_tile = tl.load(left_at, inside[None, :], 0)
        right_tile = tl.load(right_at, inside[:, None], 0)
        total = tl.dot(left_tile, right_tile, total, out_dtype=tl.int32)
        left_at += K
        right_at += K
    value = total.to(tl.float32) * tl.load(scale + down, down < tokens, 0.0)[:, None]
    if weight_scale is not None:
        value *= tl.load(weight_scale + right, right < width, 0.0)[None, :]
    if bias is not None:
        value += tl.load(bias + right, right < width, 0.0).to(tl.float32)[None, :]
    inside = (down < tokens)[:, None] & (right < width)[None, :]
    tl.store(out + down.to(tl.int64)[:, None] * width + right[None, :], value.to(out.dtype.element_ty), inside)


def int8_product(rows, scale, weight, weight_scale, bias, dtype):
    """`product.product` of integers, exact up to the last rounding."""
    (tokens, depth), width = rows.shape, len(weight)
    out = torch.empty(tokens, width, dtype=dtype, device=rows.device)
    grid = (triton.cdiv(tokens, 128) * triton.cdiv(width, 256),)
    _int8_product[grid](
        rows, scale, weight, weight_scale, bias, out, tokens, width, depth, 128, 256, 128, 8, num_warps=8, num_stages=3
    )
    return out
