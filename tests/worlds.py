"""Runs in processes of their own: one or several that train together over gloo, started in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qflux
from qflux.config import Config

HANG = 1800.0
"""Seconds until something counts as hanging. No test depends on how fast it is: a machine may be busy."""

CONTEXT = multiprocessing.get_context("forkserver")
FOLDERS = [file.parent.name for file in Path(qflux.__file__).parent.glob("models/*/family.py")]
CONTEXT.set_forkserver_preload(["qflux.commands", *(f"qflux.models.{folder}.family" for folder in FOLDERS)])


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _member(
    target: Callable[..., Any], config: Config, rank: int, size: int, port: int, notes: Path, args: Any
) -> None:
    import torch

    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    try:
        target(config, rank, *args)
    except BaseException:
        (notes / f"error-{rank}").write_text(traceback.format_exc())
        raise


class World:
    """Processes that run `target(config, rank, *args)` together."""

    def __init__(self, target: Callable[..., Any], config: Config, size: int, notes: Path, *args: Any) -> None:
        notes.mkdir(parents=True, exist_ok=True)
        self.notes = notes
        port = free_port()
        self.processes = [
            CONTEXT.Process(target=_member, args=(target, config, rank, size, port, notes, args))
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    @property
    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join(HANG)

    def finish(self, seconds: float = HANG) -> None:
        """Wait for the end; an error of a process is this test's error."""
        deadline = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < deadline:
            if any(process.exitcode for process in self.processes):
                time.sleep(2)  # the others may have something to say too
                self.kill()
            time.sleep(0.01)
        late = self.is_alive
        self.kill()
        assert not late, f"still running after {seconds} s"
        errors = [file.read_text() for file in sorted(self.notes.glob("error-*"))]
        assert not errors, "\n".join(errors)
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes)
