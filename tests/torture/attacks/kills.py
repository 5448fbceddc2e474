"""Commands killed at any line, again and again, and then run to their end: the same bytes, and nothing left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from qflux.files.atomic import new_folder, restore_folder, write_bytes
from torture.cases import Case, Outcome, Running, Wrong, command, contents, forked, require_equal
from torture.crash import ROOMS, WRITING, at_line, counting
from torture.ground import EVERY, STEPS, Ground, pictures, results

SIGNALS = (signal.SIGKILL,) * 4 + (signal.SIGTERM, signal.SIGINT)


def cache(case: Case) -> None:
    place = case.folder / "cache"
    config = case.ground.config(case.folder, cache={"path": str(place)})
    arguments = ("cache", "--config", config)
    _killed(case, "cache", arguments, kills=case.random.randint(1, 4))
    case.require(case.run(*arguments), (0,))
    case.require_clean(case.folder)
    require_equal(entries(contents(place)), entries(case.ground.cache), "the cache")
    case.require(case.run("cache", "verify", "--config", config), (0,))


def fit(case: Case) -> None:
    config = case.ground.config(case.folder, "killed")
    arguments = ("fit", "--config", config)
    _killed(case, "fit", arguments, kills=case.random.randint(1, 5))
    case.require(case.run(*arguments), (0,))
    require_run(case, case.folder / "runs" / "killed")


def require_run(case: Case, run: Path) -> None:
    """That a run ended as the undisturbed one did, with a line for each of its steps."""
    case.require_clean(run)
    require_equal(results(run), case.ground.run, "the run")
    for name, steps in (("metrics", range(1, STEPS + 1)), ("validation", range(0, STEPS + 1, EVERY))):
        lines = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
        if [line["step"] for line in lines] != list(steps):
            raise Wrong(f"{name}.jsonl has the steps {[line['step'] for line in lines]}")


def fit_of_two(case: Case) -> None:
    """Two processes, of which one or both are killed; the other must not hang on for ever, and is ended then."""
    config = case.ground.config(case.folder, "pair", data={"batch_size": 1})
    whole = case.ground.root / "pair"
    if not whole.exists():  # the first case makes what all compare with
        alone = case.ground.config(case.folder, "alone", data={"batch_size": 1})
        for outcome in _two(case, ("fit", "--config", alone), [None, None]):
            case.require(outcome, (0,))
        (case.folder / "runs" / "alone").rename(whole)
    for _ in range(case.random.randint(1, 2)):
        most = case.ground.lines["fit"]
        moments = [case.random.randint(1, most) if rank == 0 or case.random.random() < 0.5 else None for rank in (0, 1)]
        case.note(f"killed at {moments}")
        ended = _two(case, ("fit", "--config", config), moments)
        case.kills += sum(outcome.code == -signal.SIGKILL for outcome in ended)
    for outcome in _two(case, ("fit", "--config", config), [None, None]):
        case.require(outcome, (0,))
    require_equal(results(case.folder / "runs" / "pair"), results(whole), "the run of two processes")


def _two(case: Case, arguments: Sequence[object], moments: Sequence[int | None]) -> list[Outcome]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = []
    for rank, moment in enumerate(moments):
        work = _as_rank(rank, port, command(*arguments))
        processes.append(Running(at_line(ROOMS, moment)(work) if moment else work, case.folder, 100 + rank))
    if any(moments):  # torchrun ends the others when one is gone
        while all(process.is_alive() for process in processes):
            signal.sigtimedwait([], 0.02)
        for process in processes:
            if process.is_alive():
                process.send(signal.SIGKILL)
    return [process.finish() for process in processes]


def _as_rank(rank: int, port: int, work: Callable[[], None]) -> Callable[[], None]:
    def joined() -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))  # fmt: skip
        work()

    return joined


def jobs(case: Case) -> None:
    ground, output = case.ground, case.folder / "edits"
    config = ground.config(case.folder)
    arguments = ("predict", "--config", config, "--jobs", ground.jobs, "--lora", ground.adapter, "--output", output)
    _killed(case, "jobs", arguments, kills=case.random.randint(1, 4))
    case.require(case.run(*arguments), (0,))
    case.require_clean(output)
    require_equal(pictures(output), ground.edits, "the edits")


def export(case: Case) -> None:
    ground = case.ground
    form = case.random.choice(sorted(ground.exported))
    target, config = case.folder / "out" / "lora.safetensors", ground.config(case.folder)
    arguments = ("export", "--config", config, "--lora", ground.adapter, "--format", form, "--output", target)
    if case.random.random() < 0.5:
        target.parent.mkdir()
        target.write_bytes(ground.exported[form])  # what is there must stay whole

    def look() -> None:
        if target.exists() and target.read_bytes() != ground.exported[form]:
            raise Wrong("a LoRA that is half written")

    _killed(case, "export", arguments, kills=case.random.randint(2, 6), look=look)
    case.require(case.run(*arguments), (0,))
    case.require_clean(case.folder)
    require_equal({form: target.read_bytes()}, {form: ground.exported[form]}, "the export")


def replaced(case: Case) -> None:
    """A folder and files, written anew again and again: at every moment the old one or the new one is there."""
    draw, folder, counted = case.random, case.folder / "thing", case.folder / "lines"
    names = [f"part-{number}" for number in range(draw.randint(1, 4))]
    files = [case.folder / f"note-{number}.json" for number in range(3)]
    old: dict[str, bytes] = {}
    for number in range(draw.randint(3, 8)):
        new = {name: draw.randbytes(draw.randint(0, 20_000)) for name in names}
        note = f'{{"version": {number}}}\n'.encode()

        def work(new: dict[str, bytes] = new, note: bytes = note) -> None:
            with new_folder(folder) as staging:
                for name, data in new.items():
                    write_bytes(staging / name, data)
            for file in files:
                write_bytes(file, note)

        before = [file.read_bytes() if file.exists() else b"" for file in files]
        kill = draw.randint(1, int(counted.read_text().split()[0])) if number else None
        ended = forked(at_line(("files",), kill)(work) if kill else counting(counted)(work), case.folder)
        case.note(f"version {number}, killed at line {kill}: {ended.code}")
        if ended.code not in (0, -signal.SIGKILL if kill else 0):
            raise Wrong(ended.told)
        case.kills += ended.code != 0
        restore_folder(folder)
        found = contents(folder, without=[".tmp"]) if folder.exists() else {}
        if found not in (old, new):
            raise Wrong(f"version {number} is neither there nor the one before: {sorted(found)}")
        for file, then in zip(files, before, strict=True):
            if file.read_bytes() not in (then, note):
                raise Wrong(f"{file.name} is neither version {number} nor {then!r}: {file.read_bytes()!r}")
        old = found


def _killed(
    case: Case, name: str, arguments: Sequence[object], kills: int, look: Callable[[], None] = lambda: None
) -> None:
    """Run a command so often, and end it each time at another line; half of them are lines that write."""
    for _ in range(kills):
        rooms = case.random.choice((ROOMS, WRITING))
        most = case.ground.lines[f"{name}, writing" if rooms is WRITING else name]
        number, kind = case.random.randint(1, most), case.random.choice(SIGNALS)
        case.note(f"{kind.name} at line {number} of {most} in {'what writes' if rooms is WRITING else 'all'}")
        outcome = case.run(*arguments, around=at_line(rooms, number, kind))
        if kind == signal.SIGKILL:
            if outcome.code != -signal.SIGKILL:  # it was done before: less was left to do
                case.require(outcome, (0,))
        else:
            case.require(outcome, (0, 130))
        case.kills += outcome.code != 0
        look()


def entries(found: dict[str, bytes]) -> dict[str, bytes]:
    """What is in a cache, but for what it knows of files that it has looked at, and of who is at work."""
    return {name: data for name, data in found.items() if name.startswith(("entries", "samples"))}


def count_lines(ground: Ground) -> None:
    """How many lines there are to be killed at."""
    folder = ground.root / "counting"
    folder.mkdir()
    case = Case("counting", 0, ground, folder)
    config = ground.config(folder, cache={"path": str(folder / "cache")})
    own = ground.config(folder, "counted")
    commands: dict[str, tuple[object, ...]] = {
        "cache": ("cache", "--config", config),
        "fit": ("fit", "--config", own),
        "jobs": ("predict", "--config", own, "--jobs", ground.jobs, "--lora", ground.adapter, "--output", folder / "e"),
        "export": ("export", "--config", own, "--lora", ground.adapter, "--output", folder / "x.safetensors"),
    }
    for name, arguments in commands.items():
        case.require(case.run(*arguments, around=counting(folder / "count")), (0,))
        ground.lines[name], ground.lines[f"{name}, writing"] = map(int, (folder / "count").read_text().split())
    shutil.rmtree(folder)
