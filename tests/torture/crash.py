"""Ends a process at a line of its own code: the same line every time, and any line there is."""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qflux

SOURCE = str(Path(qflux.__file__).parent) + os.sep
ROOMS = ("adapters", "cache", "data", "files", "runs", "sampling", "studio", "training", "commands.py")
"""What deals with files and steps; counting the lines of the others would take long, and they write nothing."""
WRITING = ("files", "runs", "cache", "adapters/files.py", "adapters/export.py", "training/checkpoint.py",
           "sampling/jobs", "data/sources/corrections.py")  # fmt: skip

Work = Callable[[], None]


def counting(file: Path) -> Callable[[Work], Work]:
    """Writes down how many lines a process runs through, in all rooms and in those that write."""

    def around(work: Work) -> Work:
        def counted() -> None:
            counters = {True: itertools.count(), False: itertools.count()}
            _watch(ROOMS, lambda name: next(counters[name.startswith((*_prefixes(WRITING), *BELOW))]))
            try:
                work()
            finally:
                sys.settrace(None)
                writing, others = (next(counters[which]) for which in (True, False))
                file.write_text(f"{writing + others} {writing}")

        return counted

    return around


def at_line(rooms: tuple[str, ...], number: int, kind: int = signal.SIGKILL) -> Callable[[Work], Work]:
    """Sends a signal to the process when it comes to that line."""

    def around(work: Work) -> Work:
        def ended() -> None:
            counter = itertools.count(1)

            def look(name: str) -> None:
                if next(counter) == number:
                    os.kill(os.getpid(), kind)

            _watch(rooms, look)
            work()

        return ended

    return around


def _prefixes(rooms: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(SOURCE + room for room in rooms)


BELOW = tuple(str(module.__file__) for module in (pathlib, shutil))
"""What writes on behalf of others: its lines count where it was called by what writes."""


def _watch(rooms: tuple[str, ...], look: Callable[[str], Any]) -> None:
    """Call `look` with the file of every line of these rooms, in every thread."""
    prefixes, known, writing = _prefixes(rooms), dict[str, bool](), _prefixes(WRITING)

    def inside(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            look(frame.f_code.co_filename)
        return inside

    def enter(frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name in BELOW:
            caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
            return inside if caller.startswith(writing) else None
        if name not in known:
            known[name] = name.startswith(prefixes)
        return inside if known[name] else None

    threading.settrace(enter)
    sys.settrace(enter)
