"""What all commands share: the console, progress bars, how numbers are shown."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from qflux.errors import DataError, redacted
from qflux.launch import launched

if TYPE_CHECKING:
    from qflux.commands import Trainer

console = Console(emoji=False)
"""Results: what a script may want to read."""
errors = Console(stderr=True, emoji=False)
"""Errors, warnings and progress."""
QUIET = threading.Event()
"""No progress."""


def trainer_of(config: Path, overrides: list[str] | None) -> Trainer:
    """The trainer of a config file."""
    from qflux.config import load_config  # noqa: PLC0415

    settings = load_config(config, overrides or [])
    spin_less()
    with loading():
        from qflux.commands import Trainer  # noqa: PLC0415  (imports torch: bad configs should fail fast)

    return Trainer(settings)


@contextmanager
def loading() -> Iterator[None]:
    """While torch and all that needs it is imported, nothing looks for garbage among what has come to stay.

    That takes a quarter of the time otherwise (5.2 instead of 3.9 seconds on one core). Later collections leave it out.
    """
    if "qflux.commands" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def spin_less() -> None:
    """On a machine that others use too, let threads that wait give their core away. Read when torch is loaded.

    The small model on two cores, in tokens per second: 2260 spinning and 1610 not if they are idle, 630 and 1180 if a
    neighbour keeps one of them busy.
    """
    if _busy_share() > 0.3:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _busy_share(seconds: float = 0.3) -> float:
    """Of all cores' time, what others use at this moment; nothing where that can't be told."""

    def ticks() -> tuple[int, int]:
        with Path("/proc/stat").open() as file:
            times = [int(word) for word in file.readline().split()[1:9]]
        return sum(times), times[3] + times[4]

    try:
        before = ticks()
        time.sleep(seconds)
        after = ticks()
    except (OSError, ValueError, IndexError):
        return 0.0
    total, idle = after[0] - before[0], after[1] - before[1]
    return 1 - idle / total if total else 0.0


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar for the tasks added to it; of several processes only the first one shows it."""
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=errors, disable=not launched().is_first or QUIET.is_set()) as progress:
        yield progress


def stages(bar: Progress) -> Callable[[str, int, int], None]:
    """A listener that gives every stage a line of the bar."""
    tasks: dict[str, TaskID] = {}

    def update(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total, note="")
        bar.update(tasks[stage], completed=done, total=total)

    return update


class LineNowAndThen:
    """Progress for logs, where no bar is drawn: the first step, and then a line every half minute."""

    SECONDS = 30.0

    def __init__(self) -> None:
        self._last = -self.SECONDS

    def __call__(self, step: int, text: str) -> None:
        now = time.monotonic()
        if not errors.is_terminal and not QUIET.is_set() and (step == 1 or now - self._last >= self.SECONDS):
            self._last = now
            say(text)


def say_first(text: str) -> None:
    """A line that only the first of several processes prints."""
    if launched().is_first:
        say(text)


def say(text: str) -> None:
    """Print a line as it is: paths may hold brackets, and must not be broken."""
    console.print(_printable(redacted(text), console), markup=False, highlight=False, soft_wrap=True)


def complain(kind: str, text: str) -> None:
    """An error as it is, on the error stream."""
    process = "" if launched().is_first else launched().label
    errors.print(f"{process}[bold red]{kind}[/]: ", end="")
    errors.print(_printable(redacted(text), errors), markup=False, highlight=False, soft_wrap=True)


def _printable(text: str, target: Console) -> str:
    """What a terminal can't show, and bytes in file names that are no characters, is shown by its number."""
    return text.encode(target.encoding, "backslashreplace").decode(target.encoding)


def expanded(path: Path) -> Path:
    """With `~` replaced; of somebody who is not known here it is an error."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: {error}", "write the path in full.") from None


def amount(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
