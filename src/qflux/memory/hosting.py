"""Inputs of recomputed blocks that wait in host memory between the forward and the backward pass.

They are all that such blocks leave on the device, and the more tokens a pass has, the more they are. Copies run on a
stream of their own: out while the next block runs, and back while the block behind it runs backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

IN_FLIGHT = 3
"""Blocks whose inputs are on the device at the same time: on their way out or in, and in use."""
_AHEAD = 2
"""Tensors that are on their way at once: a block of two streams has two inputs."""


class HostedInputs:
    """What was saved for the backward pass, in host memory, in the order in which it was saved."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._parcels: list[weakref.ref[_Parcel]] = []
        """Of the passes that still have a graph, which holds them."""

    def saving(self, inputs: Iterable[Any]) -> AbstractContextManager[None]:
        """Inside, those of a block's inputs that have a gradient go to the host when they are saved.

        What else it is given, positions and conditions, is the same for all blocks, and stays.
        """
        leaving = {each.data_ptr() for each in inputs if isinstance(each, Tensor) and each.requires_grad}

        def send(saved: Tensor) -> Any:
            return self._sent(saved) if saved.data_ptr() in leaving else saved

        return saved_tensors_hooks(send, self._fetched)

    def _sent(self, tensor: Tensor) -> _Parcel:
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._newest()  # those of a pass that is gone are gone too
        # Not the last one: a block sends two at once, and its copy should not be waited for before the block runs.
        before = self._parcels[-_AHEAD]() if len(self._parcels) >= _AHEAD else None
        if before is not None:
            before.has_left()
        parcel = _Parcel(tensor.detach(), self._stream)
        self._parcels.append(weakref.ref(parcel))
        return parcel

    def _fetched(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # Blocks run backward in the opposite order: what was saved before this is needed next.
        # (A block's inputs come together: one of them may have been taken off the list with the other.)
        while any(reference() is packed for reference in self._parcels):
            self._parcels.pop()
        for reference in self._parcels[-_AHEAD:]:
            following = reference()
            if following is not None:
                following.send_back()
        tensor: Tensor = packed.arrived()
        return tensor

    def _newest(self) -> _Parcel | None:
        """The last one that is still waited for."""
        while self._parcels:
            parcel = self._parcels[-1]()
            if parcel is not None:
                return parcel
            self._parcels.pop()
        return None


class _Parcel:
    """A tensor on its way to the host and back."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
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

    def send_back(self) -> None:
        if self._device is not None:
            return
        if self._stream is None:
            self._device = self._host.clone()
            return
        # Allocated on the stream that will use it; what it held before was used up by what is queued there now.
        self._device = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._stream.device)
        ready = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(self._stream):
            ready.wait()
            self._device.copy_(self._host, non_blocking=True)
            self._came = self._stream.record_event()
        self._device.record_stream(self._stream)  # if an error lets go of it, the copy may still be under way

    def arrived(self) -> Tensor:
        """The tensor on the device."""
        self.send_back()
        if self._came is not None:
            self._came.wait()
        tensor, self._device = self._device, None
        assert tensor is not None
        return tensor
