"""Stopping a run without losing it: signals wait for the end of a step, and a folder belongs to one run at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qflux.errors import QfluxError

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
def exclusive(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; released by the system however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            raise QfluxError(
                f"another run (process {owner}) is writing to {folder}", "wait for it, or write somewhere else."
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
