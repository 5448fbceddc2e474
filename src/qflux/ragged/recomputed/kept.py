"""Attention whose result is kept, inside of a block whose other activations are computed again.

Recomputing a block is cheap but for attention: its share grows with the length of a sample. What its backward pass
needs beside queries, keys and values, which the rest of the block makes again, is its output and a number a row: as
much as the input of the block. So that is kept, and the kernel runs once forward and once backward.

A block's forward pass writes what attention gave into a `Record`, its recomputation reads it. Kernels are called by
`fused`, and nobody else has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`kernel(query, key, value)`, which a record may remember."""
    turn = _TURN.get()
    if turn is None or not torch.is_grad_enabled() or not any(x.requires_grad for x in (query, key, value)):
        return kernel(query, key, value)
    out: Tensor = _Remembered.apply(turn.next(kernel), query, key, value)
    return out


class Record:
    """What the attention calls of a block gave, between its forward pass and its recomputation."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the forward pass, and for the recomputation."""
        return self._taking(_Turn(self._calls, writes=True)), self._taking(_Turn(self._calls, writes=False))

    @contextmanager
    def _taking(self, turn: _Turn) -> Iterator[None]:
        turn.place = 0
        token = _TURN.set(turn)
        try:
            yield
        finally:
            _TURN.reset(token)


class _Turn:
    """One run through a block: which of its calls is next."""

    def __init__(self, calls: list[_Call], writes: bool) -> None:
        self._calls = calls
        self._writes = writes
        self.place = 0

    def next(self, kernel: Kernel) -> _Call:
        if self._writes:
            self._calls.append(_Call(kernel))
            return self._calls[-1]
        self.place += 1
        return self._calls[self.place - 1]


_TURN: ContextVar[_Turn | None] = ContextVar("turn", default=None)


class _Call:
    """A call of a kernel: its own small graph, without the three tensors that it began with."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel: Kernel | None = kernel
        self._out: Tensor | None = None
        self._leaves: list[Tensor] = []
        self._layouts: list[tuple[int, ...]] = []
        self._given: list[Tensor] = []
        """The three, while the kernel or its backward pass runs."""

    def forward(self, *given: Tensor) -> Tensor:
        """The result; it is computed the first time only."""
        if self._kernel is not None:
            self._leaves = [tensor.detach().requires_grad_() for tensor in given]
            self._layouts = [tensor.stride() for tensor in given]
            self._given.extend(self._leaves)
            with torch.enable_grad(), _without(self._given):
                self._out = self._kernel(*self._leaves)
            self._given.clear()
            for leaf in self._leaves:  # the graph holds them, but needs their place in it only
                leaf.data = leaf.new_empty(0)
            self._kernel = None
        assert self._out is not None
        return self._out.detach()

    def backward(self, grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The gradients, from the tensors that were computed again; afterwards nothing is kept."""
        assert self._out is not None
        if [tensor.stride() for tensor in given] != self._layouts:
            raise RuntimeError("queries, keys or values were computed again in another layout; report this, please")
        self._given.extend(given)
        try:
            return torch.autograd.grad(self._out, self._leaves, grad)
        finally:
            self._given.clear()
            self._leaves, self._out = [], None


def _without(given: list[Tensor]) -> saved_tensors_hooks:
    """Inside, what is saved of the tensors in a list is not kept: it is looked up there when it is needed.

    The hooks know the list and nothing else. If they knew the call, it would hold its graph, and the graph the call,
    where nobody can see that the two are garbage.
    """

    def let_go(saved: Tensor) -> Any:
        for number, tensor in enumerate(given):
            is_shared = saved.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            start = saved.storage_offset() - tensor.storage_offset()
            if is_shared and 0 <= start < _extent(tensor):
                return number, saved.shape, saved.stride(), start
        return saved

    def take_again(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, shape, stride, start = packed
        tensor = given[number]
        return tensor.as_strided(shape, stride, tensor.storage_offset() + start)

    return saved_tensors_hooks(let_go, take_again)


def _extent(tensor: Tensor) -> int:
    """How far a tensor reaches in its memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(query, key, value)
        return call.forward(query, key, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.backward(grad, *ctx.saved_tensors)
