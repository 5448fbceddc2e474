"""Commands that run on their own: each in a folder, with its log, and its end written down by whoever waits for it.

job.json     what was asked for
started      somebody has begun it: made once, by one of however many studios there are
.lock        held by the process that waits, and by the command, which inherits it: one of them lives
pid          of the process that waits; the command is in its process group
stopping     it was asked to end, which is asked once: a second interruption would lose what is not saved
log          what the command says
ended.json   the exit code; written last

The process that waits (`python -m qflux.studio.processes FOLDER`) belongs to nobody: the studio may end, and be opened
again, while a run goes on. The system drops the lock when both are gone, however they ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from qflux.files.atomic import write_bytes, write_json

State = Literal["queued", "running", "done", "failed", "stopped", "interrupted"]
_TAIL = 64 * 1024
_STARTING = 60
"""Seconds that a process may take to begin."""
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
        path.mkdir(parents=True)
        write_json(path / "job.json", asdict(job) | {"queued": time.time()})
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
        ended = _json(self.path / "ended.json")
        if ended:
            return _ENDS.get(int(ended.get("code", 1)), "failed")
        if not (self.path / "started").exists():
            return "queued"
        return "running" if self._is_held() or self._is_starting() else "interrupted"

    @property
    def is_stopping(self) -> bool:
        return (self.path / "stopping").exists()

    @property
    def code(self) -> int | None:
        return _json(self.path / "ended.json").get("code")

    def start(self, root: Path, environment: dict[str, str]) -> None:
        """Run it, as a process that outlives this one; nothing if somebody has begun it already."""
        if not self._once("started"):
            return
        with (self.path / "log").open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "qflux.studio.processes", str(self.path)],
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | environment,
            )

    def stop(self) -> None:
        """Ask it to save and end, once; what was not begun never will be."""
        if self._once("started"):
            write_json(self.path / "ended.json", {"code": 130})
        elif self.state == "running" and self._once("stopping"):
            for _ in range(_STARTING):  # it may be about to begin
                pid = self._pid()
                if pid is not None:
                    break
                time.sleep(1)
            else:
                return
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGINT)

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

    def _is_starting(self) -> bool:
        """It was begun a moment ago, and has not come so far as to hold its lock."""
        try:
            age = time.time() - (self.path / "started").stat().st_mtime
        except OSError:
            return False
        return self._pid() is None and 0 <= age < _STARTING

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


def _wait(folder: Path) -> None:
    """Run the command of a job, and write down how it ended. Signals are the command's: this only waits."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    job = JobFolder(folder).job
    if job is None:
        return
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX)  # who looks whether it is held holds it for a moment
    write_bytes(folder / "pid", str(os.getpid()).encode())
    child = subprocess.Popen([sys.executable, "-m", "qflux.cli", *job.command], pass_fds=[lock])
    code = child.wait()
    write_json(folder / "ended.json", {"code": code, "time": time.time()})


if __name__ == "__main__":
    _wait(Path(sys.argv[1]))
