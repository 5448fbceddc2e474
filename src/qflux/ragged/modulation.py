"""Modulation of tokens by the conditioning vector of their own sample.

Shapes: T tokens, R rows of conditioning (one per sample, or more where tokens of a sample differ), C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_FP16_MAX = 65504


def modulate(tokens: Tensor, scale: Tensor, shift: Tensor, row: Tensor) -> Tensor:
    """`tokens * (1 + scale) + shift` of `(T, C)`, with scale and shift `(R, C)` of each token's own row."""
    return torch.addcmul(shift.index_select(0, row), tokens, (1 + scale).index_select(0, row))


def add_gated(tokens: Tensor, gate: Tensor, update: Tensor, row: Tensor) -> Tensor:
    """`tokens + gate * update` of `(T, C)`, with the gate `(R, C)` of each token's own row."""
    return torch.addcmul(tokens, gate.index_select(0, row), update)


@dataclass
class ModulatedStream:
    """One of the two streams of a double-stream block: what happens to its tokens before and after joint attention."""

    tokens: Tensor
    """`(T, C)`"""
    row: Tensor
    """`(T,)` which row of the conditioning each token takes."""
    conditioning: Tensor
    """`(R, 6 C)` shift, scale and gate for attention, then for the MLP."""
    norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
    mlp: Callable[[Tensor], Tensor]

    def before_attention(self) -> Tensor:
        shift, scale, _, _, _, _ = self.conditioning.chunk(6, dim=-1)
        return modulate(self.norms[0](self.tokens), scale, shift, self.row)

    def after_attention(self, attended: Tensor) -> Tensor:
        _, _, gate, shift, scale, gate_mlp = self.conditioning.chunk(6, dim=-1)
        tokens = add_gated(self.tokens, gate, attended, self.row)
        return add_gated(tokens, gate_mlp, self.mlp(modulate(self.norms[1](tokens), scale, shift, self.row)), self.row)


def clip_fp16(tokens: Tensor) -> Tensor:
    """What diffusers does at the end of a block: half precision does not overflow into infinity."""
    return tokens.clip(-_FP16_MAX, _FP16_MAX) if tokens.dtype == torch.float16 else tokens
