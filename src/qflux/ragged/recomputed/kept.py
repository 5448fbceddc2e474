"""Attention whose result is kept, inside of a block whose other activations are computed again.

Recomputing a block is cheap but for attention: its share grows with the length of a sample. What its backward pass
needs beside queries, keys and values, which the rest of the block makes again, is its output and a number a row: as
much as the input of the block. So that is kept, and the kernel runs once forward and once backward.

A block's forward pass writes what attention gave into a `Record`, its recomputation reads it. Kernels are called by
`fused`, and nobody else has to know. The output may wait elsewhere meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
Send = Callable[[Tensor], Callable[[], Tensor]]
"""Takes a tensor to where it waits; what it returns brings it back, once."""


def fused(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`kernel(query, key, value)`, which a record may remember."""
    turn = _TURN.get()
    if turn is None or not torch.is_grad_enabled() or not any(x.requires_grad for x in (query, key, value)):
        return kernel(query, key, value)
    out: Tensor = _Remembered.apply(turn.next(kernel), query, key, value)
    return out


class Record:
    """What the attention calls of a block gave, between its forward pass and its recomputation."""

    def __init__(self, send: Send | None = None) -> None:
        """Outputs go where `send` takes them; none: they stay on the device."""
        self._calls: list[_Call] = []
        self._send = send

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the forward pass, and for the recomputation."""
        writing, reading = _Turn(self._calls, writes=True, send=self._send), _Turn(self._calls, writes=False)
        return self._taking(writing), self._taking(reading)

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

    def __init__(self, calls: list[_Call], writes: bool, send: Send | None = None) -> None:
        self._calls = calls
        self._writes = writes
        self._send = send
        self.place = 0

    def next(self, kernel: Kernel) -> _Call:
        if self._writes:
            self._calls.append(_Call(kernel, self._send))
            return self._calls[-1]
        self.place += 1
        return self._calls[self.place - 1]


_TURN: ContextVar[_Turn | None] = ContextVar("turn", default=None)


class _Call:
    """A call of a kernel: its own small graph, without the three tensors that it began with."""

    def __init__(self, kernel: Kernel, send: Send | None) -> None:
        self._kernel: Kernel | None = kernel
        self._send = send
        self._edge: GradientEdge | None = None
        """Where the graph is entered from its end."""
        self._result = _Result()
        self._leaves: list[Tensor] = []
        self._layouts: list[tuple[int, ...]] = []
        self._given: list[Tensor] = []
        """The three, while the kernel or its backward pass runs."""

    def forward(self, *given: Tensor) -> Tensor:
        """The result; it is computed the first time only."""
        if self._kernel is None:
            return self._result.taken()
        self._leaves = [tensor.detach().requires_grad_() for tensor in given]
        self._layouts = [tensor.stride() for tensor in given]
        self._given.extend(self._leaves)
        saved: list[_Saved] = []
        with torch.enable_grad(), _without(self._given, saved):
            out = self._kernel(*self._leaves)
        self._edge = get_gradient_edge(out)
        self._given.clear()
        for leaf in self._leaves:  # the graph holds them, but needs their place in it only
            leaf.data = leaf.new_empty(0)
        self._kernel = None
        self._result.keep(out.detach(), saved, self._send)
        return out.detach()

    def backward(self, grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The gradients, from the tensors that were computed again; afterwards nothing is kept."""
        assert self._edge is not None
        if [tensor.stride() for tensor in given] != self._layouts:
            raise RuntimeError("queries, keys or values were computed again in another layout; report this, please")
        self._given.extend(given)
        try:
            return torch.autograd.grad(self._edge, self._leaves, grad)
        finally:
            self._given.clear()
            self._leaves, self._edge, self._result = [], None, _Result()


class _Result:
    """What a call gave, between the forward pass and the recomputation; perhaps it waits elsewhere."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._bring: Callable[[], Tensor] | None = None
        self._layout: _Layout | None = None

    def keep(self, out: Tensor, saved: Sequence[_Saved], send: Send | None) -> None:
        """Keep it, or send it away; the graph has saved it too, and must not hold it then."""
        memory = out.untyped_storage()
        if send is None or memory.nbytes() != out.numel() * out.element_size():
            self._tensor = out
            return
        self._layout = _Layout.of(out)
        self._bring = send(out.as_strided((out.numel(),), (1,), 0))
        for each in saved:
            each.let_go(memory, self)

    def taken(self) -> Tensor:
        """The tensor, on the device."""
        if self._tensor is None:
            assert self._bring is not None
            assert self._layout is not None
            self._tensor, self._bring = self._layout.seen(self._bring()), None
        return self._tensor.detach()


class _Saved:
    """A tensor that the graph of a call has saved: itself, or where in the result it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._result: _Result | None = None
        self._layout = _Layout.of(tensor)

    def let_go(self, memory: torch.UntypedStorage, result: _Result) -> None:
        """If it lies in the memory of a result, look it up there."""
        if self._tensor is not None and self._tensor.untyped_storage()._cdata == memory._cdata:
            self._tensor, self._result = None, result

    def taken(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        assert self._result is not None
        return self._layout.seen(self._result.taken())


class _Layout(NamedTuple):
    """How a tensor lies in its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        return cls(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def seen(self, memory: Tensor) -> Tensor:
        """A tensor that lies so in the memory of another."""
        return memory.as_strided(*self)


def _without(given: list[Tensor], others: list[_Saved]) -> saved_tensors_hooks:
    """Inside, what is saved of the tensors in a list is not kept: it is looked up there when it is needed.

    The hooks know the list and nothing else. If they knew the call, it would hold its graph, and the graph the call,
    where nobody can see that the two are garbage. What else is saved is put into `others`.
    """

    def let_go(saved: Tensor) -> Any:
        for number, tensor in enumerate(given):
            is_shared = saved.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            start = saved.storage_offset() - tensor.storage_offset()
            if is_shared and 0 <= start < _extent(tensor):
                return number, saved.shape, saved.stride(), start
        others.append(_Saved(saved))
        return others[-1]

    def take_again(packed: Any) -> Tensor:
        if isinstance(packed, _Saved):
            return packed.taken()
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
