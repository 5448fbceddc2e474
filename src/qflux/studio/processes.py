"""Commands that run on their own: each in a folder, with its log, and its end written down by whoever waits for it.

    job.json     what was asked for
    pid          of the process that waits for the command; the command is in its process group
    log          what the command says
    ended.json   the exit code; written last

The process that waits (`python -m qflux.studio.processes FOLDER`) belongs to nobody: the studio may end, and be opened
again, while a run goes on. If it was killed itself, there is no `ended.json` and nobody has its process id any more.
"""

from __future__ import annotations

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

from qflux.files.atomic import write_json

State = Literal["queued", "running", "done", "failed", "stopped", "interrupted"]
_TAIL = 64 * 1024
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
        if not (self.path / "pid").exists():
            return "queued"
        return "running" if self._pid() is not None else "interrupted"

    @property
    def code(self) -> int | None:
        return _json(self.path / "ended.json").get("code")

    def start(self, root: Path, environment: dict[str, str]) -> None:
        """Run it, as a process that outlives this one."""
        log = (self.path / "log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "qflux.studio.processes", str(self.path)],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | environment,
        )
        log.close()
        (self.path / "pid").write_text(f"{process.pid} {_started(process.pid)}")

    def stop(self) -> None:
        """Ask it to save and end; nothing if it has ended."""
        pid = self._pid()
        if pid is None:
            if self.state == "queued":
                write_json(self.path / "ended.json", {"code": 130})
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

    def _pid(self) -> int | None:
        """Of the process that waits, if it is still that one: numbers are used again."""
        try:
            pid, started = (self.path / "pid").read_text().split()
        except (OSError, ValueError):
            return None
        return int(pid) if started != "gone" and _started(int(pid)) == started else None


def _started(pid: int) -> str:
    """What tells a process from a later one of the same number: when it was started, in ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if fields[0] == "Z" else fields[19]


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
    child = subprocess.Popen([sys.executable, "-m", "qflux.cli", *job.command])
    code = child.wait()
    write_json(folder / "ended.json", {"code": code, "time": time.time()})


if __name__ == "__main__":
    _wait(Path(sys.argv[1]))
