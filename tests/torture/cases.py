"""One case: commands that run in processes of their own, and what may come of them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

HANG = 600.0
"""Seconds until something counts as hanging: no case takes more than a few, but a machine may be busy."""
MOST_MEMORY = 2 * 2**30
SECRET = "hf_torturetorturetorturetorture"
"""In the environment of every command; it must never come out."""


class Wrong(AssertionError):  # noqa: N818  (what it says of a case)
    """What must not happen has happened."""


@dataclass(frozen=True)
class Outcome:
    """What became of a process."""

    code: int | None
    """Its exit code; negative: the signal that ended it; none: it had to be ended."""
    out: str
    err: str
    memory: int
    """Bytes at most."""

    @property
    def told(self) -> str:
        return f"exit code {self.code}\n{self.out[-1500:]}\n{self.err[-3000:]}"


def forked(work: Callable[[], Any], folder: Path, number: int = 0, seconds: float = HANG) -> Outcome:
    """Do something in a process that begins as a copy of this one."""
    return Running(work, folder, number).finish(seconds)


class Running:
    """A process that does something, with its output in files."""

    def __init__(self, work: Callable[[], Any], folder: Path, number: int = 0) -> None:
        self._files = [folder / f".{name}-{number}" for name in ("out", "err")]
        self._started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(work)

    def _become(self, work: Callable[[], Any]) -> None:
        code = 1
        try:
            os.setsid()
            for descriptor, file in zip((1, 2), self._files, strict=True):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            import torch

            torch.set_num_threads(1)
            work()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)

    def send(self, number: int) -> None:
        os.killpg(self.pid, number)

    def is_alive(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait_until_stopped(self) -> bool:
        """Wait until it stops itself; false if it has ended."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        return found is not None and found.si_code == os.CLD_STOPPED

    def wait_for_a_moment(self, seconds: float) -> None:
        """Give it some time, no more than it needs."""
        until = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)

    def finish(self, seconds: float = HANG) -> Outcome:
        deadline, pause = time.monotonic() + seconds, 0.001
        while True:
            found, status, used = os.wait4(self.pid, os.WNOHANG)
            if found:
                break
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.wait4(self.pid, 0)
                return self._outcome(None, 0)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started and left behind
        return self._outcome(os.waitstatus_to_exitcode(status), 1024 * used.ru_maxrss)

    def _outcome(self, code: int | None, memory: int) -> Outcome:
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in self._files)
        return Outcome(code, out, err, memory)


def command(*arguments: object) -> Callable[[], None]:
    """A command line of qflux, as a process of its own would run it."""

    def work() -> None:
        from qflux.cli import main

        os.environ["HF_TOKEN"] = SECRET
        main([str(argument) for argument in arguments])

    return work


@dataclass
class Case:
    """What an attack is given: where, and which."""

    name: str
    """`attack:number`."""
    seed: int
    ground: Any
    folder: Path
    """Its own, empty at first."""
    random: random.Random = field(init=False)
    notes: list[str] = field(default_factory=list)
    """What was done, for the report of a failure."""
    kills: int = 0
    _runs: int = 0

    def __post_init__(self) -> None:
        digest = sha256(f"{self.seed}/{self.name}".encode()).digest()
        self.random = random.Random(digest)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def run(
        self, *arguments: object, around: Callable[[Callable[[], None]], Callable[[], None]] | None = None
    ) -> Outcome:
        """A command; `around` may change what its process is like."""
        self._runs += 1
        self.note("qflux " + " ".join(map(str, arguments)))
        work = command(*arguments)
        return forked(around(work) if around else work, self.folder, self._runs)

    def require(self, outcome: Outcome, codes: Sequence[int] = (0, 2), names: Sequence[str] = ()) -> Outcome:
        """That a command ended as commands may; if with 2, that its message names one of `names`."""
        if outcome.code is None:
            raise Wrong(f"it hangs\n{outcome.told}")
        if outcome.code not in codes:
            raise Wrong(f"exit code {outcome.code}, not one of {list(codes)}\n{outcome.told}")
        if "Traceback (most recent call last)" in outcome.err + outcome.out:
            raise Wrong(f"a traceback\n{outcome.told}")
        if SECRET in outcome.err + outcome.out:
            raise Wrong(f"a secret comes out\n{outcome.told}")
        if outcome.memory > MOST_MEMORY:
            raise Wrong(f"{outcome.memory / 2**30:.1f} GiB of memory")
        if outcome.code == 2:
            self.require_message(outcome.err, names)
        return outcome

    def require_message(self, text: str, names: Sequence[str] = ()) -> None:
        if not re.search(r"\w{3}", text):
            raise Wrong("an error without a message")
        if len(text) > 20_000:
            raise Wrong(f"a message of {len(text)} characters: {text[:300]}")
        if names and not any(name in text for name in names):
            raise Wrong(f"the message names none of {list(names)}:\n{text}")

    def require_clean(self, folder: Path) -> None:
        """Nothing under temporary names is left by a command that was not killed."""
        left = [path for path in folder.rglob(".*.tmp") if re.fullmatch(r"\..+\.\d+\.tmp", path.name)]
        if left:
            raise Wrong(f"half-written things are left: {left[:3]}")

    def copy(self, source: Path, name: str) -> Path:
        target = self.folder / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copyfile(source, target)
        return target


def contents(folder: Path, *, without: Sequence[str] = ()) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part in str(path.relative_to(folder)) for part in without)
    }


def require_equal(found: dict[str, bytes], expected: dict[str, bytes], what: str) -> None:
    differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if differing:
        about = [f"{n}{'' if n in found else ' (missing)'}{'' if n in expected else ' (too much)'}" for n in differing]
        raise Wrong(f"{what}: {len(differing)} files differ: {', '.join(about[:5])}")


def limited(kind: int, amount: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """With a limit of the system on a process."""

    def around(work: Callable[[], None]) -> Callable[[], None]:
        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(kind, (amount, amount))
            work()

        return limit

    return around
