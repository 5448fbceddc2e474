"""Commands that run on their own: each in a folder, with its log, and its end written down by whoever waits for it.

job.json     what was asked for
.lock        held from the moment it is begun, by the process that waits and by the command: one of them lives
started      a process was made for it
pid          of that process, which waits; the command is in its process group
stopping     it was asked to end, which is asked once: a second interruption would lose what is not saved
log          what the command says
ended.json   the exit code; written last, while the lock is held

Whoever has the lock of a job that nobody has begun may begin it; its process inherits the lock, so there is no moment
at which it could be begun twice, or be lost. The process that waits (`python -m qflux.studio.processes`) belongs to
nobody: the studio may end, and be opened again, while a run goes on. The system drops the lock when both are gone,
however they ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from qflux.files.atomic import new_folder, write_bytes, write_json

State = Literal["queued", "running", "done", "failed", "stopped", "interrupted"]
_TAIL = 64 * 1024
_STARTING = 60
"""Seconds that a process may take to write down its number."""
_ENDS: dict[int, State] = {
    0: "done",
    130: "stopped",
    143: "stopped",
    -signal.SIGINT: "stopped",
    -signal.SIGTERM: "stopped",
    137: "interrupted",
    -signal.SIGKILL: "interrupted",
}
"""What an exit code means; any other is a failure."""


@dataclass(frozen=True)
class Job:
    """A command to run."""

    kind: str
    """train, try, export, inspect, check."""
    command: list[str]
    """Behind `qflux`."""
    about: dict[str, Any] = field(default_factory=dict)
    lane: str = "side"
    """Jobs of one lane run one after another: a GPU is one, and so is everything that needs none."""
    queued: float = 0.0


@dataclass(frozen=True)
class JobFolder:
    """A job on disk."""

    path: Path

    @classmethod
    def create(cls, parent: Path, job: Job) -> JobFolder:
        number = f"{time.time_ns():020d}"
        path = parent / f"{number}-{job.kind}"
        with new_folder(path) as staging:
            write_json(staging / "job.json", asdict(job) | {"queued": time.time()})
        return cls(path)

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def job(self) -> Job | None:
        values = _json(self.path / "job.json")
        try:
            return Job(**values) if values else None
        except TypeError:
            return None

    @property
    def state(self) -> State:
        # In this order: a job is begun, then it ends, and then its lock is free.
        was_begun, is_held = self._was_begun(), self._is_held()
        ended = _json(self.path / "ended.json")
        if ended:
            return _ENDS.get(int(ended.get("code", 1)), "failed")
        if is_held:
            return "running"
        return "interrupted" if was_begun else "queued"

    @property
    def is_stopping(self) -> bool:
        return (self.path / "stopping").exists()

    @property
    def code(self) -> int | None:
        return _json(self.path / "ended.json").get("code")

    def start(self, root: Path, environment: dict[str, str]) -> None:
        """Run it, as a process that outlives this one; nothing if somebody has begun it already."""
        with self._beginning() as lock:
            if lock is None:
                return
            with (self.path / "log").open("ab") as log:
                subprocess.Popen(
                    [sys.executable, "-m", "qflux.studio.processes", str(self.path), str(lock)],
                    cwd=root,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[lock],
                    env=os.environ | environment,
                )
            self._once("started")

    def stop(self) -> None:
        """Ask it to save and end, once; what was not begun never will be."""
        with self._beginning() as lock:
            if lock is not None:
                write_json(self.path / "ended.json", {"code": 130})
                return
        if self.state == "running" and self._once("stopping"):
            for _ in range(10 * _STARTING):  # it may be about to begin
                pid = self._pid()
                if pid is not None:
                    break
                time.sleep(0.1)
            else:
                return
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGINT)

    @contextmanager
    def _beginning(self) -> Iterator[int | None]:
        """The lock, held, of a job that nobody has begun; nothing for any other."""
        try:
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # it was forgotten meanwhile
            yield None
            return
        try:
            yield lock if self._is_taken(lock) and not self._was_begun() else None
        finally:
            os.close(lock)

    def _is_taken(self, lock: int) -> bool:
        """Take the lock, unless the job has been begun. Who only looks holds it too, for a moment: then try again."""
        while not self._was_begun():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.01)
        return False

    def _was_begun(self) -> bool:
        """Or stopped before."""
        return any((self.path / name).exists() for name in ("started", "pid", "ended.json"))

    def log(self, tail: int = _TAIL) -> str:
        try:
            with (self.path / "log").open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - tail))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _once(self, name: str) -> bool:
        """Make a mark; false if it is there already."""
        try:
            os.close(os.open(self.path / name, os.O_CREAT | os.O_EXCL))
        except OSError:
            return False
        return True

    def _pid(self) -> int | None:
        try:
            return int((self.path / "pid").read_text())
        except (OSError, ValueError):
            return None

    def _is_held(self) -> bool:
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _wait(folder: Path, lock: int) -> None:
    """Run the command of a job, and write down how it ended. Signals are the command's: this only waits."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    job = JobFolder(folder).job
    if job is None:
        return
    write_bytes(folder / "pid", str(os.getpid()).encode())
    child = subprocess.Popen([sys.executable, "-m", "qflux.cli", *job.command], pass_fds=[lock])
    code = child.wait()
    write_json(folder / "ended.json", {"code": code, "time": time.time()})


if __name__ == "__main__":
    _wait(Path(sys.argv[1]), int(sys.argv[2]))
