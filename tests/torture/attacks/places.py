"""Places and times that are not as a command expects: full disks, folders of others, company, clocks that go back."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torture.attacks.kills import entries, require_run
from torture.cases import Case, Running, Wrong, command, contents, limited, require_equal
from torture.crash import ROOMS, at_line
from torture.ground import pictures

MEETING = 30.0
"""Seconds for the second of two commands on a run to end, before the first, which has stopped, goes on."""


def full(case: Case) -> None:
    """A disk that is full, or no file can grow beyond some size: it is said, and nothing is half-written."""
    ground = case.ground
    with _disk(case) as disk:
        place, output = disk.folder / "cache", disk.folder / "edits"
        ways = {
            "fit": ("fit", "--config", ground.config(case.folder, "full", output_dir=str(disk.folder / "runs"))),
            "cache": ("cache", "--config", ground.config(case.folder, "filled", cache={"path": str(place)})),
            "jobs": ("predict", "--config", ground.config(case.folder), "--jobs", ground.jobs, "--lora", ground.adapter,
                     "--output", output),
            "export": ("export", "--config", ground.config(case.folder), "--lora", ground.adapter, "--format",
                       "comfyui", "--output", disk.folder / "lora.safetensors"),
        }  # fmt: skip
        name = case.random.choice(sorted(ways))

        def require_result() -> None:
            if name == "fit":
                require_run(case, disk.folder / "runs" / "full")
            elif name == "cache":
                require_equal(entries(contents(place)), entries(ground.cache), "the cache")
            elif name == "jobs":
                require_equal(pictures(output), ground.edits, "the edits")
            elif (disk.folder / "lora.safetensors").read_bytes() != ground.exported["comfyui"]:
                raise Wrong("the export is another one")

        # What tells of it may have no room either: the message of the process itself is in a file, too.
        outcome = case.run(*ways[name], around=disk.around)
        case.require(outcome, (0, 2) if disk.holds_messages else (0, 1, 2, 120))
        if outcome.code == 0:
            require_result()
        disk.make_room()
        case.require(case.run(*ways[name]), (0,))
        require_result()


@dataclass(frozen=True)
class _Disk:
    """A place that has little room at first."""

    folder: Path
    holds_messages: bool
    """What a process says is written elsewhere, or may be long enough."""
    around: Callable[[Callable[[], None]], Callable[[], None]] | None
    make_room: Callable[[], None]


@contextmanager
def _disk(case: Case) -> Iterator[_Disk]:
    """A disk in memory that is full after some bytes; half of the time, or where none can be made, a limit on files."""
    folder, size, most = (
        case.folder / "disk",
        int(2 ** case.random.uniform(13, 21)),
        int(2 ** case.random.uniform(4, 20)),
    )
    folder.mkdir()
    if case.random.random() < 0.5 or not _mounted(folder, size):
        case.note(f"files of at most {most} bytes")
        yield _Disk(folder, most > 4000, limited(resource.RLIMIT_FSIZE, most), lambda: None)
        return
    case.note(f"a disk of {size} bytes")
    try:
        yield _Disk(folder, True, None, lambda: _mount(folder, 2**28, _REMOUNT))
    finally:
        _system().umount2(os.fsencode(folder), 2)


_NEW_MOUNTS, _PRIVATE, _REMOUNT = 0x20000, 0x4000 | 0x40000, 0x20


def _mounted(folder: Path, size: int) -> bool:
    """Mount a disk that only this process and those it starts see, so that it is gone with them."""
    if os.getuid() != 0 or _system().unshare(_NEW_MOUNTS) != 0:
        return False
    return _system().mount(b"none", b"/", None, _PRIVATE, None) == 0 and _mount(folder, size) == 0


def _mount(folder: Path, size: int, flags: int = 0) -> int:
    return _system().mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, f"size={size}".encode())


def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def forbidden(case: Case) -> None:
    """Somebody who may not write there, or not read it."""
    ground = case.ground
    place = case.folder / "there"
    place.mkdir()
    config = ground.config(place, "mine", cache={"path": str(place / "cache")})
    ways = {
        "fit": ("fit", "--config", config),
        "cache": ("cache", "--config", config),
        "report": ("report", place / "runs" / "mine"),
        "export": ("export", "--config", config, "--lora", ground.adapter, "--output", place / "x" / "l.safetensors"),
    }
    name = case.random.choice(sorted(ways))
    place.chmod(case.random.choice((0o555, 0o500, 0o111, 0o000)))
    before = contents(place)

    case.require(case.run(*ways[name], around=_without_privileges), (2,), names=(str(place), "there"))
    place.chmod(0o755)
    require_equal(contents(place), before, "what nobody may change")


def _without_privileges(work: Callable[[], None]) -> Callable[[], None]:
    """For root, permissions hold only without its capabilities."""

    def ordinary() -> None:
        header = struct.pack("Ii", 0x20080522, 0)
        if os.getuid() == 0 and ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)) != 0:
            raise OSError(ctypes.get_errno(), "capset")
        work()

    return ordinary


def two_at_once(case: Case) -> None:
    """A run belongs to one command; another one says so, or comes when the first is done. Caches belong to all.

    The first command stops at a line of its code, and goes on when the second has ended: so they meet where the seed
    says, and not where the machine's load does.
    """
    ground, place = case.ground, case.folder / "cache"
    kind = case.random.choice(("fit", "cache"))
    changes = {"cache": {"path": str(place)}} if kind == "cache" else {}
    arguments = (kind, "--config", ground.config(case.folder, "shared", **changes))
    number = case.random.randint(1, ground.lines[kind])
    case.note(f"the first stops at line {number} of {ground.lines[kind]}")
    first = Running(at_line(ROOMS, number, signal.SIGSTOP)(command(*arguments)), case.folder, 50)
    has_stopped = first.wait_until_stopped()
    second = Running(command(*arguments), case.folder, 51)
    # Where they take turns (headers, entries that both need), the second waits for the first, which must go on then.
    second.wait_for_a_moment(case.random.random() if kind == "cache" else MEETING)
    if has_stopped:
        first.send(signal.SIGCONT)
    outcomes = [first.finish(), second.finish()]
    for outcome in outcomes:
        case.require(outcome, (0, 2) if kind == "fit" else (0,), names=("shared",))
    if kind == "cache":
        require_equal(entries(contents(place)), entries(ground.cache), "the cache")
        return
    if not any(outcome.code == 0 for outcome in outcomes):
        case.require(case.run(*arguments), (0,))
    require_run(case, case.folder / "runs" / "shared")


def clock(case: Case) -> None:
    """Time goes backwards and in jumps."""
    ground, original = case.ground, time.time
    jumps = [case.random.choice((-1e5, -3600.0, -1.0, 0.0, 1.0, 1e6)) for _ in range(50)]

    def confused(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            calls = iter(range(10**9))
            time.time = lambda: max(0.0, original() + jumps[next(calls) % len(jumps)])
            work()

        return run

    arguments = ("fit", "--config", ground.config(case.folder, "clock"))
    case.require(case.run(*arguments, around=confused), (0,))
    require_run(case, case.folder / "runs" / "clock")
    case.require(case.run("report", case.folder / "runs" / "clock", around=confused), (0,))
