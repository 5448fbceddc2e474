"""Frozen blocks whose weights stay in host memory, and are copied to the device ahead of their use.

Two slots on the device take turns: block i always runs from slot i modulo two, so its weights never move; only what the
slot holds changes. Blocks run forward one after another, and backward in the opposite order: when one begins, the next
one is on its way already, on a stream of its own. Nothing is ever copied back.

Blocks that train are recomputed. What autograd keeps of a block for later would be a view of a slot, which by then
holds the weights of another block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

SLOTS = 2
"""One that runs, and one that is on its way."""
_ALIGNED = 512
"""Bytes at whose multiples tensors begin in a slot, as they would anywhere else on a device."""


class StreamedBlocks:
    """Blocks that take turns on the device."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """`blocks` are in the order in which they run; what does not train of them is taken to the host."""
        frozen = [[leaf for p in block.parameters() if not p.requires_grad for leaf in leaves(p)] for block in blocks]
        sizes = [sum(map(_room, tensors)) for tensors in frozen]
        count = min(SLOTS, len(blocks))
        self._slots = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(count)]
        self._holds: list[int | None] = [None] * count
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        for slot in self._slots if self._stream is not None else ():
            slot.record_stream(self._stream)  # type: ignore[arg-type]
        self._arrived: list[torch.cuda.Event | None] = [None] * count
        self._host = [
            self._moved(tensors, size, self._slots[place % count], pinned=is_cuda)
            for place, (tensors, size) in enumerate(zip(frozen, sizes, strict=True))
        ]
        self._last = -1
        for place, block in enumerate(blocks):
            self._attend(place, block)

    @property
    def host_bytes(self) -> int:
        return sum(weights.numel() for weights in self._host)

    def _moved(self, tensors: Sequence[Tensor], size: int, slot: Tensor, pinned: bool) -> Tensor:
        """The weights of a block in one piece of host memory; they become views of their slot."""
        host, start = torch.empty(size, dtype=torch.uint8), 0
        if pinned:
            host = page_locked(host)
        for tensor in tensors:
            if any(tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in self._slots):
                raise ValueError("two blocks share a weight: they can't be streamed")
            _view(host, start, tensor).copy_(tensor.data)
            tensor.data = _view(slot, start, tensor)
            start += _room(tensor)
        return host

    def _attend(self, place: int, block: Any) -> None:
        """Have the weights there whenever a block is called: outside of what is compiled, and of what is recomputed."""
        # A block that held itself would be freed by the garbage collector only, and its host memory with it.
        compiled, itself = block._compiled_call_impl, weakref.ref(block)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(place)
            run = compiled or itself()._call_impl  # type: ignore[union-attr]
            return run(*args, **kwargs)

        block._compiled_call_impl = call

    def _enter(self, place: int) -> None:
        """A block is about to run: wait for its weights, and send for those that follow."""
        ahead = 1 if place > self._last else -1
        self._last = place
        used = None
        if self._stream is not None:
            # What was queued so far has been the last use of all other slots.
            used = torch.cuda.Event()
            used.record()
        for following in range(len(self._slots)):
            self._send_for(place + ahead * following, used)
        arrived = self._arrived[place % len(self._slots)]
        if arrived is not None:
            arrived.wait()

    def _send_for(self, place: int, used: torch.cuda.Event | None) -> None:
        number = place % len(self._slots)
        if not 0 <= place < len(self._host) or self._holds[number] == place:
            return
        self._holds[number] = None  # whatever happens meanwhile, nobody takes half a copy for a whole one
        weights = self._host[place]
        target = self._slots[number][: weights.numel()]
        if self._stream is None or used is None:
            target.copy_(weights)
        else:
            with torch.cuda.stream(self._stream):
                used.wait()
                target.copy_(weights, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record()
            self._arrived[number] = arrived
        self._holds[number] = place


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, or numbers in fewer bits and their scales."""
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is None:
        yield tensor
        return
    for name in inner()[0]:
        yield from leaves(getattr(tensor, name))


def spread(streamed: int, blocks: int) -> list[int]:
    """Which of so many blocks are streamed: evenly spread, so that there is time between them."""
    return [place * blocks // streamed for place in range(streamed)]


def page_locked(host: Tensor) -> Tensor:
    """The same memory, from which a device can copy by itself.

    torch's own pinned memory comes in powers of two: a model of 22 GB could take 40.
    """
    address = host.data_ptr()
    status = torch.cuda.cudart().cudaHostRegister(address, host.numel() * host.element_size(), 0)
    if int(status):  # a system that allows little of it, perhaps; torch's own way says what is wrong
        with suppress(RuntimeError):  # CUDA would tell this error to whoever asks next
            torch.zeros(1, device="cuda").add_(1).item()
        return host.pin_memory()
    weakref.finalize(host.untyped_storage(), _unlock, address)
    return host


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    size = like.numel() * like.element_size()
    return memory[start : start + size].view(like.dtype).view(like.shape)
