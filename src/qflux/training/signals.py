"""What surrounds a run: signals wait for the end of a step, and arithmetic repeats if that is asked for."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


class StopRequest:
    """Whether SIGINT, SIGTERM or SIGHUP has arrived. A second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def _receive(self, number: int, frame: Any) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            logger.warning(
                "stopping and saving at the end of this step; once more stops at once and loses what is not saved"
            )
        self.requested = True


@contextmanager
def deferred_signals() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM for the length of the block; outside the main thread signals can't be caught."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {
        number: signal.signal(number, request._receive)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores one for good reason
    }
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Use only deterministic kernels inside the block, if that is wanted.

    The backward of fast attention kernels adds up in an order that varies from run to run; on a CPU nothing does.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrix product runs
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
