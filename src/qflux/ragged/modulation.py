"""Modulation of tokens by the conditioning vector of their own sample.

Shapes: T tokens, R rows of conditioning (one per sample, or more where tokens of a sample differ), C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qflux.ragged import fused

_FP16_MAX = 65504


def norm_modulate(norm: nn.LayerNorm, tokens: Tensor, scale: Tensor, shift: Tensor | None, row: Tensor) -> Tensor:
    """`norm(tokens) * (1 + scale) + shift` of `(T, C)`, with scale and shift `(R, C)` of each token's own row."""
    if fused.ready(tokens):
        return fused.norm_modulate(tokens, norm.eps, scale, shift, row)
    if shift is None:
        return norm(tokens) * take(1 + scale, row)
    return torch.addcmul(take(shift, row), norm(tokens), take(1 + scale, row))


def add_gated(tokens: Tensor, gate: Tensor, update: Tensor, row: Tensor) -> Tensor:
    """`tokens + gate * update` of `(T, C)`, with the gate `(R, C)` of each token's own row."""
    if fused.ready(tokens):
        return fused.add_gated(tokens, gate, update, row)
    return torch.addcmul(tokens, take(gate, row), update)


def take(table: Tensor, row: Tensor) -> Tensor:
    """Rows `(T, C)` of a table `(R, C)`: each token's own."""
    return _Take.apply(table, row)


class _Take(torch.autograd.Function):
    """The gradient of a row is the sum over its tokens, as a matrix product.

    `index_select` would add them up one by one: tens of thousands of tokens queue for a handful of rows, in an order
    that varies on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        ctx.rows = len(table)
        return table.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (row,) = ctx.saved_tensors
        belongs = torch.arange(ctx.rows, device=row.device)[:, None] == row
        return belongs.to(grad.dtype) @ grad, None


@dataclass
class ModulatedStream:
    """One of the two streams of a double-stream block: what happens to its tokens before and after joint attention."""

    tokens: Tensor
    """`(T, C)`"""
    row: Tensor
    """`(T,)` which row of the conditioning each token takes."""
    conditioning: Tensor
    """`(R, 6 C)` shift, scale and gate for attention, then for the MLP."""
    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    """Without weights of their own."""
    mlp: Callable[[Tensor], Tensor]
    """`(T, C)` to `(T, C)`; the family's own."""

    def of(self, read: Callable[[Tensor], Tensor]) -> ModulatedStream:
        """The stream of those tokens that are read behind a block."""
        return replace(self, tokens=read(self.tokens), row=read(self.row))

    def before_attention(self) -> Tensor:
        shift, scale, _, _, _, _ = self.conditioning.chunk(6, dim=-1)
        return norm_modulate(self.norms[0], self.tokens, scale, shift, self.row)

    def after_attention(self, attended: Tensor) -> Tensor:
        _, _, gate, shift, scale, gate_mlp = self.conditioning.chunk(6, dim=-1)
        tokens = add_gated(self.tokens, gate, attended, self.row)
        modulated = norm_modulate(self.norms[1], tokens, scale, shift, self.row)
        return add_gated(tokens, gate_mlp, self.mlp(modulated), self.row)


def clip_fp16(tokens: Tensor) -> Tensor:
    """What diffusers does at the end of a block: half precision does not overflow into infinity."""
    return tokens.clip(-_FP16_MAX, _FP16_MAX) if tokens.dtype == torch.float16 else tokens
