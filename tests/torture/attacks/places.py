"""Places and times that are not as a command expects: full disks, folders of others, company, clocks that go back."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import time
from collections.abc import Callable

from torture.attacks.kills import require_run
from torture.cases import Case, Running, command, contents, limited, require_equal
from torture.ground import pictures


def full(case: Case) -> None:
    """No file can grow beyond some size: as a full disk, it is said, and nothing is half-written."""
    ground, output = case.ground, case.folder / "edits"
    place = case.folder / "cache"
    ways = {
        "fit": ("fit", "--config", ground.config(case.folder, "full")),
        "cache": ("cache", "--config", ground.config(case.folder, "filled", cache={"path": str(place)})),
        "jobs": ("predict", "--config", ground.config(case.folder), "--jobs", ground.jobs, "--lora", ground.adapter,
                 "--output", output),
    }  # fmt: skip
    name = case.random.choice(sorted(ways))
    most = int(10 ** case.random.uniform(1, 6))
    case.note(f"files of at most {most} bytes")
    outcome = case.run(*ways[name], around=limited(resource.RLIMIT_FSIZE, most))
    # What tells of it has no room either: the message of the process itself is in a file.
    case.require(outcome, (0, 2) if most > 4000 else (0, 1, 2, 120))
    case.require(case.run(*ways[name]), (0,))
    if name == "fit":
        require_run(case, case.folder / "runs" / "full")
    elif name == "jobs":
        require_equal(pictures(output), ground.edits, "the edits")


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
    """A run belongs to one command; another one says so, or comes when the first is done. Caches belong to all."""
    ground = case.ground
    if case.random.random() < 0.5:
        arguments: tuple[object, ...] = ("fit", "--config", ground.config(case.folder, "shared"))
    else:
        place = case.folder / "cache"
        arguments = ("cache", "--config", ground.config(case.folder, "shared", cache={"path": str(place)}))
    processes = [Running(command(*arguments), case.folder, 50 + number) for number in range(2)]
    if case.random.random() < 0.5:
        time.sleep(case.random.random())
    outcomes = [process.finish() for process in processes]
    for outcome in outcomes:
        case.require(outcome, (0, 2), names=("shared",))
    if arguments[0] == "fit":
        if not any(outcome.code == 0 for outcome in outcomes):
            case.require(case.run(*arguments), (0,))
        require_run(case, case.folder / "runs" / "shared")
    else:
        for outcome in outcomes:
            case.require(outcome, (0,))
        names = ("entries", "samples")
        found, wanted = (
            {n: d for n, d in files.items() if n.startswith(names)} for files in (contents(place), ground.cache)
        )
        require_equal(found, wanted, "the cache")


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
