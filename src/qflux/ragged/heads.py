"""Queries and keys of a ragged batch: normalised per head, in joint order, turned by their positions.

Shapes: L text, N image, T = L + N joint tokens of the whole batch; H heads, D channels of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from qflux.ragged import fused
from qflux.ragged.layout import RaggedLayout
from qflux.ragged.rope import Rotary, rotate


def _fits(x: Tensor) -> bool:
    """The kernel holds a head in a block, and blocks are powers of 2."""
    return fused.ready(x) and x.shape[-1].bit_count() == 1


def turned_heads(x: Tensor, norm: nn.Module, rotary: Rotary, exact: bool = False) -> Tensor:
    """Heads `(T, H, D)` of joint tokens, normalised and turned; with `exact`, nothing is rounded in between."""
    if _fits(x):
        out = x.new_empty(x.shape)
        fused.place_heads(out, x, None, norm, rotary, exact)
        return out
    return rotate(norm(x.float()), rotary).to(x.dtype) if exact else rotate(norm(x), rotary)


def join_turned_heads(
    layout: RaggedLayout, text: Tensor, image: Tensor, norms: tuple[nn.Module, nn.Module], rotary: Rotary
) -> Tensor:
    """Heads of text `(L, H, D)` and image `(N, H, D)` tokens, each by its own norm, joined `(T, H, D)` and turned."""
    if _fits(text):
        out = text.new_empty(len(text) + len(image), *text.shape[1:])
        for x, rows, norm in zip((text, image), layout.streams.joint_rows, norms, strict=True):
            fused.place_heads(out, x, rows, norm, rotary)
        return out
    return rotate(layout.join(norms[0](text), norms[1](image)), rotary)


def join_heads(layout: RaggedLayout, text: Tensor, image: Tensor) -> Tensor:
    """Heads as they are, joined: the values."""
    if _fits(text):
        out = text.new_empty(len(text) + len(image), *text.shape[1:])
        for x, rows in zip((text, image), layout.streams.joint_rows, strict=True):
            fused.place_heads(out, x, rows)
        return out
    return layout.join(text, image)
