"""Heads of one stream of tokens or of two, normalised, put to their places and turned: one pass over memory each way.

A compiler goes over queries and keys twice on their way to attention, and back once for each kind of sum in there.

Shapes: T tokens, H heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qflux.ragged import fused
from qflux.ragged.rope import Rotary, rotate


class HeadNorm(NamedTuple):
    """An RMS norm over the channels of a head."""

    weight: Tensor | None
    eps: float
    rounds_first: bool = False
    """diffusers' own class rounds before it applies the weight; torch's does not."""

    @classmethod
    def of(cls, norm: Any, x: Tensor) -> HeadNorm:
        return cls(norm.weight, float(norm.eps or torch.finfo(x.dtype).eps), not isinstance(norm, nn.RMSNorm))


def has_kernels(x: Tensor, norm: nn.Module) -> bool:
    """Whether kernels can do it: a head fills a block, and nobody asks for the gradient of the norm's weight."""
    is_trained = isinstance(norm.weight, Tensor) and norm.weight.requires_grad
    return fused.possible(x) and x.shape[-1].bit_count() == 1 and not (is_trained and torch.is_grad_enabled())


def turned(
    streams: Sequence[Tensor],
    norms: Sequence[HeadNorm],
    rows: Sequence[Tensor] | None,
    rotary: Rotary,
    exact: bool = False,
) -> Tensor:
    """Streams `(T_i, H, D)`, each by its own norm, at their rows of `(T, H, D)`, turned by the positions of those.

    With `exact`, nothing is rounded between the norm and the turn. The norms differ in their weights only.
    """
    tensors = [*streams, *(norm.weight for norm in norms if norm.weight is not None), *(rows or ())]
    settings = norms[0].eps, norms[0].rounds_first and not exact, exact
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _forward(*_sorted(tensors), rotary, *settings)
    out: Tensor = _Turned.apply(rotary, *settings, *tensors)
    return out


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rotary: Tensor, eps: float, rounds_first: bool, exact: bool, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(rotary, *tensors)
        ctx.eps = eps
        return forward_op(*_sorted(tensors), rotary, eps, rounds_first, exact)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rotary, *tensors = ctx.saved_tensors
        streams, weights, rows = _sorted(tensors)
        gradients = [
            backward_op(grad, x, rows[place] if rows else None, weights[place] if weights else None, rotary, ctx.eps)
            for place, x in enumerate(streams)
        ]
        return *(None,) * 4, *gradients, *(None,) * (len(tensors) - len(streams))


def _sorted(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Streams, weights of their norms (or none), rows of each (or none): a tensor's dimensions say what it is."""
    streams = [tensor for tensor in tensors if tensor.ndim == 3]
    rest = [tensor for tensor in tensors if tensor.ndim == 1]
    weights = [tensor for tensor in rest if tensor.is_floating_point()]
    return streams, weights, [tensor for tensor in rest if not tensor.is_floating_point()]


def _forward(
    streams: Sequence[Tensor],
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    rotary: Tensor,
    eps: float,
    rounds_first: bool,
    exact: bool,
) -> Tensor:
    out = _empty(streams)
    for place, x in enumerate(streams):
        norm = HeadNorm(weights[place] if weights else None, eps, rounds_first)
        if x.is_cuda:
            fused.place_heads(out, x, rows[place] if rows else None, norm, rotary, exact)
        elif rows:
            out[rows[place]] = _plain(x, norm, rotary[rows[place]], exact)
        else:
            out = _plain(x, norm, rotary, exact)
    return out


# Operators of their own, so that compiled code takes the kernels as they are.
forward_op = torch.library.custom_op("qflux::turned_heads", _forward, mutates_args=())


@forward_op.register_fake
def _(
    streams: Sequence[Tensor],
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    rotary: Tensor,
    eps: float,
    rounds_first: bool,
    exact: bool,
) -> Tensor:
    return _empty(streams)


@torch.library.custom_op("qflux::turned_heads_gradient", mutates_args=())
def backward_op(
    grad: Tensor, x: Tensor, rows: Tensor | None, weight: Tensor | None, rotary: Tensor, eps: float
) -> Tensor:
    """The gradient of a stream, given that of all heads; rounded once, at the end."""
    if x.is_cuda:
        return fused.turned_gradient(grad, x, rows, weight, rotary, eps)
    if rows is not None:
        grad, rotary = grad[rows], rotary[rows]
    values = x.float()
    of_normed = rotate(grad.float(), torch.stack([rotary[..., 0], -rotary[..., 1]], dim=-1))
    if weight is not None:
        of_normed = of_normed * weight.float()
    inverse = (values.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    normed = values * inverse
    return (inverse * (of_normed - normed * (of_normed * normed).mean(dim=-1, keepdim=True))).to(x.dtype)


@backward_op.register_fake
def _(grad: Tensor, x: Tensor, rows: Tensor | None, weight: Tensor | None, rotary: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _plain(x: Tensor, norm: HeadNorm, rotary: Tensor, exact: bool) -> Tensor:
    """What the kernel does to a stream."""
    values = x.float() * (x.float().square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt()
    if norm.rounds_first:
        values = values.to(x.dtype).float()
    if norm.weight is not None:
        values = values * norm.weight.float()
    return rotate(values if exact else values.to(x.dtype), rotary).to(x.dtype)


def _empty(streams: Sequence[Tensor]) -> Tensor:
    return streams[0].new_empty(sum(x.shape[0] for x in streams), *streams[0].shape[1:])
