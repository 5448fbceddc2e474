"""Queries and keys of a ragged batch: normalised per head, in joint order, turned by their positions.

Shapes: L text, N image, T = L + N joint tokens of the whole batch; H heads, D channels of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from qflux.ragged import fused
from qflux.ragged.fused.turned import HeadNorm, has_kernels, turned
from qflux.ragged.layout import RaggedLayout
from qflux.ragged.rope import Rotary, rotate


def turned_heads(x: Tensor, norm: nn.Module, rotary: Rotary, exact: bool = False) -> Tensor:
    """Heads `(T, H, D)` of joint tokens, normalised and turned; with `exact`, nothing is rounded in between."""
    if has_kernels(x, norm):
        return turned([x], [HeadNorm.of(norm, x)], None, rotary, exact)
    return rotate(norm(x.float()), rotary).to(x.dtype) if exact else rotate(norm(x), rotary)


def join_turned_heads(
    layout: RaggedLayout, text: Tensor, image: Tensor, norms: tuple[nn.Module, nn.Module], rotary: Rotary
) -> Tensor:
    """Heads of text `(L, H, D)` and image `(N, H, D)` tokens, each by its own norm, joined `(T, H, D)` and turned."""
    if has_kernels(text, norms[0]) and has_kernels(image, norms[1]):
        own = [HeadNorm.of(norms[0], text), HeadNorm.of(norms[1], image)]
        return turned([text, image], own, layout.streams.joint_rows, rotary)
    return rotate(layout.join(norms[0](text), norms[1](image)), rotary)


def join_heads(layout: RaggedLayout, text: Tensor, image: Tensor) -> Tensor:
    """Heads as they are, joined: the values."""
    if fused.ready(text) and text.shape[-1].bit_count() == 1:
        out = text.new_empty(len(text) + len(image), *text.shape[1:])
        for x, rows in zip((text, image), layout.streams.joint_rows, strict=True):
            fused.place_heads(out, x, rows)
        return out
    return layout.join(text, image)
