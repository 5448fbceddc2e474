"""What recomputed blocks keep, waiting in host memory between the forward and the backward pass.

Their inputs, and what attention gave if that is kept: all that such blocks leave on the device, and the more tokens a
pass has, the more it is. Copies run on a stream of their own: out while the next block runs, and back while the block
behind it runs backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

IN_FLIGHT = 6
"""Blocks for which there is room on the device at the same time, when the forward pass is done and the backward pass
begins: what the last ones have saved, and the places of those that come back."""


class HostMemory:
    """What was saved for the backward pass, block by block in the order in which they ran."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._places: dict[tuple[int, int], Tensor] = {}
        """Memory on the device that what comes back from the host takes turns in."""
        self._there: dict[tuple[int, int], weakref.ref[_Parcel]] = {}
        """Whose turn it is in each."""
        self._blocks: list[list[weakref.ref[_Parcel]]] = []
        """Of the passes that still have a graph, which holds them."""

    def saving(self, inputs: Iterable[Any]) -> AbstractContextManager[None]:
        """Inside, those of a block's inputs that have a gradient go to the host when they are saved.

        What else it is given, positions and conditions, is the same for all blocks, and stays.
        """
        leaving = {each.data_ptr() for each in inputs if isinstance(each, Tensor) and each.requires_grad}
        self._forget()
        # Not what the last block has sent: this one should not wait for it before it runs.
        for parcel in self._alive(self._blocks[-2] if len(self._blocks) > 1 else ()):
            parcel.has_left()
        self._blocks.append([])

        def send(saved: Tensor) -> Any:
            return self._sent(saved) if saved.data_ptr() in leaving else saved

        return saved_tensors_hooks(send, self._fetched)

    def send(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Let a tensor of the block that runs go to the host; what is returned brings it back, once."""
        parcel = self._sent(tensor)
        return lambda: self._fetched(parcel)

    def _sent(self, tensor: Tensor) -> _Parcel:
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        of_block = self._blocks[-1]
        parcel = _Parcel(tensor.detach(), self._stream, (len(self._blocks) % 2, len(of_block)))
        of_block.append(weakref.ref(parcel))
        return parcel

    def _place(self, parcel: _Parcel, like: Tensor) -> Tensor:
        """Memory for a tensor. Blocks take turns in two places: when one is sent for, the one before last is through.

        Were it allocated anew for each block, it would lie between what blocks need for a moment, which does not fit
        there any more.
        """
        key, size = parcel.key, like.numel() * like.element_size()
        last = self._there.get(key, lambda: None)()
        if last is not None and last is not parcel:
            last.lose()  # a backward pass went no further: it will be sent for again
        self._there[key] = weakref.ref(parcel)
        memory = self._places.get(key)
        if memory is None or memory.numel() < size:
            assert self._stream is not None
            memory = self._places[key] = torch.empty(size, dtype=torch.uint8, device=self._stream.device)
            memory.record_stream(self._stream)  # should it be replaced, the copy may still be under way
        return memory[:size].view(like.dtype).view(like.shape)

    def _fetched(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        place = next((n for n, sent in enumerate(self._blocks) if any(each() is packed for each in sent)), None)
        if place is not None:
            self._blocks[place] = [each for each in self._blocks[place] if each() is not packed]
            # Blocks run backward in the opposite order: what is left of this one, and what the one before it has saved.
            for number in (place, place - 1)[: place + 1]:
                for parcel in self._alive(self._blocks[number]):
                    parcel.send_back(self._place)
            del self._blocks[place + 1 :]
        tensor: Tensor = packed.arrived(self._place)
        return tensor

    def _forget(self) -> None:
        """Blocks of a pass that is gone."""
        while self._blocks and not any(self._alive(self._blocks[-1])):
            self._blocks.pop()

    @staticmethod
    def _alive(sent: Iterable[weakref.ref[_Parcel]]) -> list[_Parcel]:
        return [parcel for reference in sent if (parcel := reference()) is not None]


class _Parcel:
    """A tensor on its way to the host and back."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None, key: tuple[int, int]) -> None:
        self._stream = stream
        self.key = key
        """Its block, even or odd, and its number in it."""
        self._device: Tensor | None = tensor
        self._left = self._came = None
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=stream is not None)
        if stream is None:
            self._host.copy_(tensor)
            return
        made = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(stream):
            made.wait()
            self._host.copy_(tensor, non_blocking=True)
            self._left = stream.record_event()

    def has_left(self) -> None:
        """Let go of the tensor on the device: what comes after this waits for its copy."""
        if self._left is not None:
            self._left.wait()
        self._left = self._device = None

    def lose(self) -> None:
        """Somebody else has its place now."""
        self._device = self._came = None

    def send_back(self, place: Callable[[_Parcel, Tensor], Tensor]) -> None:
        if self._device is not None:
            return
        if self._stream is None:
            self._device = self._host.clone()
            return
        self._device = place(self, self._host)
        # What was there before was used up by what is queued now.
        ready = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(self._stream):
            ready.wait()
            self._device.copy_(self._host, non_blocking=True)
            self._came = self._stream.record_event()

    def arrived(self, place: Callable[[_Parcel, Tensor], Tensor]) -> Tensor:
        """The tensor on the device."""
        self.send_back(place)
        for copied in (self._left, self._came):  # one that has not left yet is let go of, and its memory written anew
            if copied is not None:
                copied.wait()
        tensor, self._device = self._device, None
        assert tensor is not None
        return tensor
