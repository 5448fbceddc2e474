"""`python -m torture`: attacks for some minutes, or one case again."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torture.attacks import ATTACKS
from torture.attacks.kills import count_lines
from torture.cases import Case, Wrong
from torture.ground import Ground, prepare


def short(chosen: list[str]) -> Iterator[tuple[str, int]]:
    """The few cases of the fixed part, which are the same for every seed that is."""
    for name in chosen:
        for number in range(ATTACKS[name].quick):
            yield name, number


def order(chosen: list[str]) -> Iterator[tuple[str, int]]:
    """Cases without end, kinds mixed by their shares."""
    numbers: Counter[str] = Counter()
    while True:
        for name in chosen:
            for _ in range(ATTACKS[name].share):
                yield name, numbers[name]
                numbers[name] += 1


def attempt(name: str, number: int, seed: int, ground: Ground, keep: Path | None = None) -> dict[str, object]:
    """Do one case; what came of it."""
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=ground.root.parent))
    case = Case(f"{name}:{number}", seed, ground, folder)
    problem = None
    started = time.monotonic()
    try:
        ATTACKS[name].do(case)
    except Wrong as wrong:
        problem = str(wrong)
    except Exception:
        problem = traceback.format_exc()
    if problem is not None and keep is not None:
        shutil.copytree(
            folder, keep / f"{name}-{number}", symlinks=True, dirs_exist_ok=True, ignore_dangling_symlinks=True
        )
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "case": case.name, "attack": name, "kills": case.kills, "problem": problem, "notes": case.notes,
        "seconds": time.monotonic() - started,
    }  # fmt: skip


def work(ground: Ground, options: argparse.Namespace, share: int, until: float, out: Path) -> None:
    """Every so many-th case, until the time is over or all are done."""
    chosen = [name for name in ATTACKS if not options.only or name.startswith(tuple(options.only))]
    with out.open("a") as file:
        for place, (name, number) in enumerate(short(chosen) if options.quick else order(chosen)):
            if place % options.workers != share:
                continue
            if time.monotonic() > until and not options.quick:
                return
            file.write(json.dumps(attempt(name, number, options.seed, ground, options.keep)) + "\n")
            file.flush()


def table(lines: list[dict]) -> str:
    """What was tried, and what went wrong."""
    rows = ["| attack | tried | kills | wrong |", "|---|---|---|---|"]
    for name in ATTACKS:
        own = [line for line in lines if line["attack"] == name]
        if own:
            kills, wrong = sum(line["kills"] for line in own), sum(line["problem"] is not None for line in own)
            rows.append(f"| {name} | {len(own):,} | {kills:,} | {wrong} |")
    kills, wrong = sum(line["kills"] for line in lines), sum(line["problem"] is not None for line in lines)
    rows.append(f"| all | {len(lines):,} | {kills:,} | {wrong} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", default=[], help="attacks, or beginnings of their names")
    parser.add_argument("--repeat", help="ATTACK:NUMBER, one case again")
    parser.add_argument("--quick", action="store_true", help="the short, fixed part, whatever time it takes")
    parser.add_argument("--stop", action="store_true", help="end with the first failure")
    parser.add_argument("--keep", type=Path, default=Path("runs/torture"), help="where what failed is kept")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ |= {
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run([sys.executable, "-m", "torture", *sys.argv[1:]], check=False).returncode
    import qflux.cli.app
    import qflux.commands  # noqa: F401  (loaded once, for all processes)

    root = Path(tempfile.mkdtemp(prefix="torture-"))
    root.chmod(0o755)
    try:
        return run(options, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run(options: argparse.Namespace, root: Path) -> int:
    ground = prepare(root / "ground")
    count_lines(ground)
    options.keep.mkdir(parents=True, exist_ok=True)
    if options.repeat:
        name, _, number = options.repeat.partition(":")
        found = attempt(name, int(number), options.seed, ground, options.keep)
        print("\n".join(map(str, [*found["notes"], found["problem"] or "fine"])))
        return int(found["problem"] is not None)
    until, files, workers = time.monotonic() + 60 * options.minutes, [], []
    for number in range(options.workers):
        files.append(root / f"found-{number}.jsonl")
        pid = os.fork()
        if pid == 0:
            try:
                work(ground, options, number, until, files[-1])
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        workers.append(pid)
    told: set[str] = set()
    failed = 0
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            workers.remove(pid)
            failed += status != 0
        lines = read(files)
        for line in lines:
            if line["problem"] is not None and line["case"] not in told:
                told.add(line["case"])
                print(f"\nWRONG {line['case']} (python -m torture --repeat {line['case']} --seed {options.seed})")
                print("\n".join(f"  {note}" for note in line["notes"]) + f"\n{line['problem']}", flush=True)
                if options.stop:
                    for pid in workers:
                        os.kill(pid, signal.SIGKILL)
                    workers = []
                    break
        time.sleep(1 if workers else 0)
    lines = read(files)
    if failed:
        print("a worker has ended early; see above")
    print(f"\nseed {options.seed}, {options.minutes:g} minutes, {options.workers} workers\n\n{table(lines)}")
    return int(failed or not lines or any(line["problem"] is not None for line in lines))


def read(files: list[Path]) -> list[dict]:
    return [
        json.loads(line)
        for file in files
        if file.exists()
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


if __name__ == "__main__":
    sys.exit(main())
