"""The last product of a block, which a recomputation leaves out.

A block ends by adding `gate * linear(tokens)` to what it was given. When it is computed again for its backward pass,
nobody reads that result: the gradient of `tokens` needs the weight, and the gradient of the gate is nobody's unless the
gate trains. In FLUX.1 that product is 41 % of the arithmetic of a single-stream block's linear layers, and a third of a
double-stream block's.

A block says in `unread` which layers those are; they get a class whose product `leaving_out` skips
(`memory.recomputation`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Unread(NamedTuple):
    """Layers of a block, by name, whose results only its own result depends on."""

    layers: tuple[str, ...]
    gates: tuple[str, ...] = ()
    """What makes the factors of those results, as far as it is inside of the block."""


@contextmanager
def leaving_out() -> Iterator[None]:
    """Inside, the products of last layers are not computed; what they give means nothing."""
    token = _LEFT_OUT.set(True)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


def is_left_out() -> bool:
    """Whether the product of a last layer is not wanted now."""
    return _LEFT_OUT.get()


_LEFT_OUT: ContextVar[bool] = ContextVar("left_out", default=False)


class LastLinear(nn.Linear):
    """A frozen linear layer at the end of a block."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or input.dtype != self.weight.dtype:
            return super().forward(input)
        out: Tensor = _product(input, self.weight, self.bias)
        return out


# An operator of its own, so that compiled code asks when it runs whether the product is wanted: a forward pass and its
# recomputation are the same code, and save the same tensors.
@torch.library.custom_op("qflux::last_product", mutates_args=())
def _product(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if is_left_out():
        return nothing(tokens, len(weight))
    return F.linear(tokens, weight, bias)


@_product.register_fake
def _(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nothing(tokens, weight.shape[0])


def nothing(tokens: Tensor, width: int) -> Tensor:
    """What stands for a product that is left out."""
    return tokens.new_empty(*tokens.shape[:-1], width)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (weight,) = ctx.saved_tensors
    return grad @ weight, None, None


_product.register_autograd(_backward, setup_context=_save)
