"""Figures of a step, from the device to the host without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Readback(Generic[T]):
    """A queue of small tensors on their way to the host, each with a note of what it belongs to.

    The host goes on queueing work meanwhile; on a GPU the figures of a step arrive during the next one.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[T, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, note: T, values: Tensor) -> None:
        """Send `values` `(n,)` off."""
        if not values.is_cuda:
            self._pending.append((note, values.detach().clone(), None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values.detach(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending.append((note, host, arrived))

    def clear(self) -> None:
        """Forget what is under way."""
        self._pending.clear()

    def arrived(self, wait: bool = False) -> Iterator[tuple[T, list[float]]]:
        """What is here by now, in order; with `wait`, everything."""
        while self._pending:
            note, host, arrived = self._pending[0]
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            self._pending.popleft()
            yield note, host.tolist()
