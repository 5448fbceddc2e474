"""The Triton kernels behind `fused`. One program per token, which holds its channels, or those of a few heads."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_modulate(
    tokens, scale, shift, row, out, eps, scale_stride, shift_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(tokens + token * WIDTH + column, inside, 0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    normed = normed.to(out.dtype.element_ty).to(tl.float32)
    source = tl.load(row + token)
    factor = 1.0 + tl.load(scale + source * scale_stride + column, inside).to(tl.float32)
    factor = factor.to(out.dtype.element_ty).to(tl.float32)
    value = normed * factor
    if shift is not None:
        value += tl.load(shift + source * shift_stride + column, inside).to(tl.float32)
    tl.store(out + token * WIDTH + column, value.to(out.dtype.element_ty), inside)


@triton.jit
def add_gated(tokens, gate, update, row, out, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    here = token * WIDTH + column
    factor = tl.load(gate + tl.load(row + token) * gate_stride + column, inside).to(tl.float32)
    change = factor * tl.load(update + here, inside).to(tl.float32)
    total = tl.load(tokens + here, inside).to(tl.float32) + change
    tl.store(out + here, total.to(out.dtype.element_ty), inside)


@triton.jit
def place_heads(
    x,
    out,
    rows,
    weight,
    rotary,
    eps,
    stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    EXACT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target = token if rows is None else tl.load(rows + token)
    head = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    value = tl.load(x + token * stride + head * WIDTH + column, inside, 0.0).to(tl.float32)
    if NORMED:
        value = value * tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]
        if ROUND_FIRST:
            value = value.to(out.dtype.element_ty).to(tl.float32)
        if weight is not None:
            value = value * tl.load(weight + column).to(tl.float32)
        if not EXACT:
            value = value.to(out.dtype.element_ty).to(tl.float32)
    if rotary is not None:
        turn = tl.load(rotary + target * WIDTH + tl.arange(0, WIDTH)).to(tl.float32)
        cos, sin = tl.split(tl.reshape(turn, (WIDTH // 2, 2)))
        real, imaginary = tl.split(tl.reshape(value, (BLOCK, WIDTH // 2, 2)))
        turned = tl.join(real * cos[None, :] - imaginary * sin[None, :], real * sin[None, :] + imaginary * cos[None, :])
        value = tl.reshape(turned, (BLOCK, WIDTH))
    tl.store(out + target * (HEADS * WIDTH) + head * WIDTH + column, value.to(out.dtype.element_ty), inside)


@triton.jit
def turned_gradient(
    grad,
    x,
    out,
    rows,
    weight,
    rotary,
    eps,
    stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    source = token if rows is None else tl.load(rows + token)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    given = tl.load(grad + source * (HEADS * WIDTH) + head * WIDTH + column, inside, 0.0).to(tl.float32)
    turn = tl.load(rotary + source * WIDTH + tl.arange(0, WIDTH)).to(tl.float32)
    cos, sin = tl.split(tl.reshape(turn, (WIDTH // 2, 2)))
    real, imaginary = tl.split(tl.reshape(given, (BLOCK, WIDTH // 2, 2)))
    back = tl.join(real * cos[None, :] + imaginary * sin[None, :], imaginary * cos[None, :] - real * sin[None, :])
    of_normed = tl.reshape(back, (BLOCK, WIDTH))
    if weight is not None:
        of_normed *= tl.load(weight + column).to(tl.float32)
    value = tl.load(x + token * stride + head * WIDTH + column, inside, 0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]
    normed = value * inverse
    value = inverse * (of_normed - normed * (tl.sum(of_normed * normed, axis=1) / WIDTH)[:, None])
    tl.store(out + token * (HEADS * WIDTH) + head * WIDTH + column, value.to(out.dtype.element_ty), inside)
