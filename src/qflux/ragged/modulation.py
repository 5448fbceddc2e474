"""Modulation of tokens by the conditioning vector of their own sample.

Shapes: T tokens, R rows of conditioning (one per sample, or more where tokens of a sample differ), C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FP16_MAX = 65504


def modulate(tokens: Tensor, scale: Tensor, shift: Tensor, row: Tensor) -> Tensor:
    """`tokens * (1 + scale) + shift` of `(T, C)`, with scale and shift `(R, C)` of each token's own row."""
    return torch.addcmul(shift.index_select(0, row), tokens, (1 + scale).index_select(0, row))


def add_gated(tokens: Tensor, gate: Tensor, update: Tensor, row: Tensor) -> Tensor:
    """`tokens + gate * update` of `(T, C)`, with the gate `(R, C)` of each token's own row."""
    return torch.addcmul(tokens, gate.index_select(0, row), update)


def clip_fp16(tokens: Tensor) -> Tensor:
    """What diffusers does at the end of a block: half precision does not overflow into infinity."""
    return tokens.clip(-_FP16_MAX, _FP16_MAX) if tokens.dtype == torch.float16 else tokens
