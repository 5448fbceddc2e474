"""Memory that a computation would take, without taking it: tensors on the `meta` device, counted as they come and go.

The computation is the real one, operation by operation, so what autograd keeps, what recomputation drops and what a
backward pass needs for a moment is all in the count. What is not: buffers inside of kernels, and how a compiler fuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class MemoryCount(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make inside of it, while they live."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Tensors in `known`, weights for example, are not counted, and their views neither."""
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {_storage(tensor) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _storage(tensor)
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def take_fused_norms(module: nn.Module) -> None:
    """Let norms keep what they keep on a GPU: elsewhere torch takes them apart, and keeps float32 copies."""
    for norm in module.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.forward = partial(_fused_norm, norm.weight)  # type: ignore[method-assign]


def _fused_norm(weight: Tensor | None, rows: Tensor) -> Tensor:
    out: Tensor = _FusedNorm.apply(rows, weight)
    return out


class _FusedNorm(torch.autograd.Function):
    """Keeps its input as it is, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight, rows.new_empty(rows.shape[:-1], dtype=torch.float32))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, weight, _ = ctx.saved_tensors
        return torch.empty_like(rows), None if weight is None else torch.empty_like(weight)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
