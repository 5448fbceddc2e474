"""MLPs around a GELU, without passes over memory that a matrix product does on its way. A family says which it has."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from torch import Tensor, nn

from qflux.ragged import fused
from qflux.ragged.eightbit.linear import EightBitLinear
from qflux.ragged.eightbit.mlp import gelu_mlp


def gelu_feed_forward(mlp: Any, tokens: Tensor) -> Tensor:
    """diffusers' `FeedForward` whose activation is the tanh-approximated GELU."""
    inner, _, out = mlp.net
    if isinstance(inner, GELU) and inner.approximate == "tanh":
        if isinstance(inner.proj, EightBitLinear) and isinstance(out, EightBitLinear):
            return gelu_mlp(inner.proj, out, tokens)
        if _can_fuse(inner.proj, tokens):
            return out(fused.gelu_linear(inner.proj, tokens))
    return mlp(tokens)


def gelu_beside(up: nn.Module, down: nn.Module, tokens: Tensor, beside: Tensor) -> Tensor:
    """`down(cat([beside, gelu(up(tokens))]))` with the tanh approximation."""
    if isinstance(up, EightBitLinear) and isinstance(down, EightBitLinear):
        return gelu_mlp(up, down, tokens, beside)
    if _can_fuse(up, tokens):
        return linear_of_two(down, beside, fused.gelu_linear(up, tokens))
    return linear_of_two(down, beside, F.gelu(up(tokens), approximate="tanh"))


def linear_of_two(linear: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    """`linear(cat([first, second]))`: one product over the channels of two tensors, `(T, C1)` and `(T, C2)`."""
    if _can_fuse(linear, first):
        return fused.linear_of_two(linear, first, second)
    of_two = getattr(linear, "of_two", None)  # in 8 bits, or with a LoRA
    return linear(torch.cat([first, second], dim=1)) if of_two is None else of_two(first, second)


def _can_fuse(linear: nn.Module, tokens: Tensor) -> TypeGuard[nn.Linear]:
    return fused.ready(tokens) and fused.is_plain(linear, tokens)
