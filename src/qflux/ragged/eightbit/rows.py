"""Rows of 8-bit numbers, each with a scale of its own.

A token's scale is the largest of its own channels: what a sample becomes does not depend on the others of its batch.

Shapes: T tokens, C channels.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from qflux.ragged import fused

if fused.HAS_TRITON:
    from qflux.ragged.eightbit import kernels

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The greatest number of each kind: what the largest of a row becomes."""
SMALLEST = 1e-30
"""A scale at least; a row of zeros stays one."""

Rows = tuple[Tensor, Tensor]
"""Numbers `(T, C)` in 8 bits, and what each row is to be multiplied by, `(T,)` in float32."""


def has_kernels(x: Tensor) -> bool:
    """Whether there is Triton for it; a compiler writes kernels by itself, and joins them to what comes before."""
    return fused.HAS_TRITON and x.is_cuda and not torch.compiler.is_compiling()


def in_rows(x: Tensor, dtype: torch.dtype, factor: Tensor | None = None) -> Rows:
    """`x` `(T, C)`, its channels multiplied by a factor `(C,)` if there is one, rounded to 8 bits row by row.

    A row with a NaN or an infinity gets a scale that is none either, so that it is seen in the product.
    """
    if has_kernels(x):
        return kernels.in_rows(x, dtype, factor, LARGEST[dtype], SMALLEST)
    if x.is_meta:  # where memory is counted: kernels and compiled code make nothing in between
        return torch.empty_like(x, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)
    values = x.float() if factor is None else x.float() * factor
    scale = (values.abs().amax(dim=1) / LARGEST[dtype]).clamp_min(SMALLEST)
    values = values / scale[:, None]
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale


def in_rows_once(x: Tensor, dtype: torch.dtype) -> Rows:
    """`in_rows` of `x` `(..., C)`, remembered until something else is asked for: queries, keys and values are made of
    the same tokens.

    For code that runs without a gradient as it is written; a compiler finds repetitions by itself, and can't see
    through what a thread remembers. A tensor without a version is one of which nobody can tell whether it has changed.
    """
    if torch.compiler.is_compiling() or torch.is_inference(x):
        return in_rows(x.reshape(-1, x.shape[-1]), dtype)
    key = x._version, x.shape, x.stride(), dtype
    if _LAST.of is not None and _LAST.of() is x and _LAST.key == key:
        return _LAST.rows
    rows = in_rows(x.reshape(-1, x.shape[-1]), dtype)
    _LAST.of, _LAST.key, _LAST.rows = weakref.ref(x), key, rows
    return rows


class _Last(threading.local):
    of: weakref.ref[Tensor] | None = None
    key: tuple[object, ...] = ()
    rows: Rows


_LAST = _Last()
