"""The command line. Commands only parse, show progress and print; the work is in `qflux.commands`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exit code 0: done, 2: the input is wrong, 130: interrupted, 1: a bug.

    Nothing is imported before signals are caught: Ctrl-C in the first moment, while Python still reads modules, ends a
    command as it does later.
    """
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    former = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and shells ignore one for good reason
                former[number] = signal.signal(number, stop)
    try:
        from qflux.cli.app import run  # noqa: PLC0415

        run(arguments, lambda: bool(received))
    except KeyboardInterrupt:  # before there was anything to say it with
        sys.stderr.write("interrupted: stopped; run the same command again.\n")
        sys.exit(130)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
