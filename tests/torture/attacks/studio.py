"""What the studio writes, killed at any line: what was answered holds, nothing is done twice, and the rest is whole."""

from __future__ import annotations

import copy
import json
import signal
import time
from pathlib import Path
from typing import Any

from torture.cases import Case, Wrong, forked
from torture.crash import at_line

ROOMS = ("data/sources/corrections.py", "files")
LINES = 150
"""About as many as a few changes run through."""
OF_JOBS = ("studio/queue.py", "studio/processes.py", "files")
LINES_OF_JOBS = 500

State = dict[str, dict[str, Any]]


def corrections_killed(case: Case) -> None:
    draw, folder, said = case.random, case.folder / "corrections", case.folder / "said"
    changes: list[list[dict[str, Any]] | None] = [
        None
        if number and draw.random() < 0.3  # the last one is taken back
        else [{"sample": f"scene {draw.randrange(4)}", draw.choice(("prompt", "mask")): f"words {number}"}]
        for number in range(draw.randint(3, 12))
    ]
    states, done = _states(changes), 0
    for kill in (*(draw.randint(1, LINES) for _ in range(draw.randint(1, 4))), None):
        said.write_text(str(done))

        def work(kill: int | None = kill, done: int = done) -> None:
            if kill is not None:
                at_line(ROOMS, kill, signal.SIGKILL)(lambda: _change(folder, changes, done, said))()
            else:
                _change(folder, changes, done, said)

        outcome = forked(work, case.folder)
        if outcome.code not in ((0,) if kill is None else (0, -signal.SIGKILL)):
            raise Wrong(outcome.told)
        case.kills += outcome.code == -signal.SIGKILL
        answered, found = int(said.read_text() or done), _read(folder)
        case.note(f"killed at line {kill}, after {answered} of {len(changes)}")
        possible = [number for number in (answered, answered + 1) if number < len(states) and states[number] == found]
        if not possible:
            raise Wrong(f"after {answered} changes it should be {json.dumps(states[answered])}, is {json.dumps(found)}")
        done = possible[0]
    if done != len(changes):
        raise Wrong(f"{done} of {len(changes)} changes were made")


def _change(folder: Path, changes: list[Any], done: int, said: Path) -> None:
    from qflux.data.sources.corrections import Corrections

    for number in range(done, len(changes)):
        corrections = Corrections.read(folder)
        if changes[number] is None:
            corrections.undo()
        else:
            corrections.add(changes[number])
        said.write_text(str(number + 1))


def _read(folder: Path) -> State:
    from qflux.data.sources.corrections import Corrections

    return Corrections.read(folder).of()


def _states(changes: list[Any]) -> list[State]:
    """What is said after each change, by a stack of copies."""
    stack: list[State] = [{}]
    states = [stack[-1]]
    for change in changes:
        if change is None:
            stack = stack[:-1] or stack
        else:
            state = copy.deepcopy(stack[-1])
            for each in change:
                state.setdefault(each["sample"], {}).update({k: v for k, v in each.items() if k != "sample"})
            stack.append(state)
        states.append(stack[-1])
    return states


def queue_killed(case: Case) -> None:
    """Jobs asked of a studio that is killed: each that was answered is done, once, by the one that comes after."""
    draw, folder, said = case.random, case.folder / "jobs", case.folder / "said"
    lanes = [draw.choice(("side", "cpu")) for _ in range(draw.randint(2, 4))]
    done = 0
    for kill in (*(draw.randint(1, LINES_OF_JOBS) for _ in range(draw.randint(1, 3))), None):
        said.write_text(str(done))

        def work(kill: int | None = kill, done: int = done) -> None:
            asked = lambda: _ask(folder, lanes, done, said)  # noqa: E731
            (at_line(OF_JOBS, kill, signal.SIGKILL)(asked) if kill is not None else asked)()

        outcome = forked(work, case.folder)
        if outcome.code not in ((0,) if kill is None else (0, -signal.SIGKILL)):
            raise Wrong(outcome.told)
        case.kills += outcome.code == -signal.SIGKILL
        answered, known = int(said.read_text() or done), sorted(folder.glob("*/job.json"))
        case.note(f"killed at line {kill}, after {answered} of {len(lanes)}")
        if not answered <= len(known) <= answered + 1:
            raise Wrong(f"{len(known)} jobs are there, {answered} were answered")
        done = len(known)
    case.require(forked(lambda: _advance(folder), case.folder), (0,))
    case.require_clean(folder)
    for job in sorted(folder.iterdir()):
        said_by, ended = (job / "log").read_text(), json.loads((job / "ended.json").read_text())
        if ended["code"] != 0 or said_by.count("qflux") != 1:
            raise Wrong(f"{job.name} ended with {ended['code']}, its log says {said_by!r}")


def _ask(folder: Path, lanes: list[str], done: int, said: Path) -> None:
    from qflux.studio.processes import Job
    from qflux.studio.queue import Queue

    queue = Queue(folder, folder.parent)
    for number in range(done, len(lanes)):
        queue.add(Job("train", ["--version"], {"number": number}, lanes[number]))
        said.write_text(str(number + 1))


def _advance(folder: Path) -> None:
    """A studio that is opened, until nothing is left to do."""
    from qflux.studio.queue import Queue

    queue = Queue(folder, folder.parent)
    queue.open()
    while any(job.state in ("queued", "running") for job in queue.jobs()):
        time.sleep(0.05)
    queue.close()
