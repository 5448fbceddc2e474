"""Locks between processes: `Claims` on parts of a folder that several fill, `exclusive` for a folder of one owner.

A claim is a lock on one byte of one file.

The system drops the locks of a process however it ends, so a claim never outlives its owner and nothing has to be
cleaned up. Works between processes of one machine, and of several where the file system locks across them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qflux.errors import CacheError, QfluxError

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""The folder in which files are written before they get their names."""
_WHOLE = 0
"""The byte that stands for the folder itself; keys take the others."""
_TURN = "0" * 15


class Claims:
    """The claims of this process on the folder `root`. One per process and folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        self._file = os.open(root / "locks", os.O_RDWR | os.O_CREAT, 0o644)

    def close(self) -> None:
        os.close(self._file)

    def claim(self, key: str, wait: bool = False) -> bool:
        """Claim a hexadecimal key; false if another process has it. With `wait`, wait until it is free."""
        return self._lock(_place(key), fcntl.LOCK_EX, wait)

    def release(self, key: str) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _place(key))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One process after the other."""
        if not self.claim(_TURN):
            logger.warning("waiting for another process that reads the images' headers")
            self.claim(_TURN, wait=True)
        try:
            yield
        finally:
            self.release(_TURN)

    @contextmanager
    def sharing(self) -> Iterator[Path]:
        """Take part in filling the folder. Gives a folder for unfinished files; those of dead processes are removed."""
        if not self._lock(_WHOLE, fcntl.LOCK_SH, wait=False):
            raise CacheError(f"{self._root} is being cleaned up by another process", "wait for it to end.")
        self._remove_leftovers()
        staging = self._root / UNFINISHED / secrets.token_hex(8)
        self.claim(staging.name)
        staging.mkdir(parents=True, exist_ok=True)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            self.release(staging.name)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _WHOLE)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work on the folder while nobody fills it."""
        if not self._lock(_WHOLE, fcntl.LOCK_EX, wait=False):
            raise CacheError(f"{self._root} is being filled by another process", "wait for it to end.")
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _WHOLE)

    def _lock(self, place: int, kind: int, wait: bool) -> bool:
        try:
            fcntl.lockf(self._file, kind if wait else kind | fcntl.LOCK_NB, 1, place)
            return True
        except (BlockingIOError, PermissionError):
            return False

    def _remove_leftovers(self) -> None:
        for folder in (self._root / UNFINISHED).glob("*"):
            if re.fullmatch("[0-9a-f]{16}", folder.name) and self.claim(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
                self.release(folder.name)


def _place(key: str) -> int:
    """The byte of a key; two keys share one with a chance of one in 2^60, and would then only wait for each other."""
    return 1 + int(key[:15], 16)


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
