"""MLPs around a GELU, without passes over memory that a matrix product does on its way. A family says which it has."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from torch import Tensor, nn

from qflux.ragged import fused


def gelu_feed_forward(mlp: Any, tokens: Tensor) -> Tensor:
    """diffusers' `FeedForward` whose activation is the tanh-approximated GELU."""
    inner, _, out = mlp.net
    if isinstance(inner, GELU) and inner.approximate == "tanh" and _can_fuse(inner.proj, tokens):
        return out(fused.gelu_linear(inner.proj, tokens))
    return mlp(tokens)


def gelu_linear(linear: nn.Module, tokens: Tensor) -> Tensor:
    """`gelu(linear(tokens))` with the tanh approximation."""
    if _can_fuse(linear, tokens):
        return fused.gelu_linear(linear, tokens)
    return F.gelu(linear(tokens), approximate="tanh")


def linear_of_two(linear: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    """`linear(cat([first, second]))`: one product over the channels of two tensors, `(T, C1)` and `(T, C2)`."""
    if _can_fuse(linear, first):
        return fused.linear_of_two(linear, first, second)
    return linear(torch.cat([first, second], dim=1))


def _can_fuse(linear: nn.Module, tokens: Tensor) -> TypeGuard[nn.Linear]:
    return fused.ready(tokens) and fused.is_plain(linear, tokens)
