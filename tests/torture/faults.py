"""Bugs put into a copy of the code on purpose, to see whether attacks find them: `python -m torture.faults`.

A fault is a file, what stands there, and what is put in its place. Each is given some minutes of all attacks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Fault:
    """What is broken, and how."""

    what: str
    file: str
    there: str
    instead: str


FAULTS = {
    "not renamed": Fault(
        "files are written a second time under their final name, and not renamed",
        "files/atomic.py",
        "        temporary.replace(path)\n",
        "        path.write_bytes(temporary.read_bytes())\n",
    ),
    "checksums": Fault(
        "the checksums of a cache entry are not compared when it is read",
        "cache/tensor_file.py",
        "if parsed.metadata.get(kind) != checksum(parsed.bare, buffer[parsed.start :].data):",
        'if parsed.metadata.get(kind) == "":',
    ),
    "manifest not compared": Fault(
        "a checkpoint's manifest is not compared with its files",
        "training/checkpoint.py",
        "if file.stat().st_size != size or file_hash(file) != digest:",
        "if not file.exists():",
    ),
    "in place": Fault(
        "a folder that is replaced is removed before the new one is there",
        "files/atomic.py",
        "            final.rename(aside)\n",
        "            shutil.rmtree(final)\n",
    ),
    "step lost": Fault(
        "a resumed run begins a step too late",
        "training/checkpoint.py",
        '        return int(saved["step"])\n',
        '        return int(saved["step"]) + 1\n',
    ),
    "lines stay": Fault(
        "a resumed run leaves the lines of steps that it does again",
        "runs/metrics.py",
        "        self._path = path\n        kept: dict[int, dict[str, Any]] = {}\n",
        "        self._path, self._last = path, -1\n        if steps_done > 0:\n            return\n"
        "        kept: dict[int, dict[str, Any]] = {}\n",
    ),
    "torn line": Fault(
        "a line that a kill has torn is an error",
        "files/jsonl.py",
        "        except (ValueError, RecursionError):\n            continue\n",
        "        except RecursionError:\n            continue\n",
    ),
    "swallowed": Fault(
        "an error while a file is written is swallowed",
        "files/atomic.py",
        "        raise OSError(error.errno, error.strerror, str(path)) from error\n",
        "        return\n",
    ),
    "unknown keys": Fault(
        "unknown keys of a config are left aside",
        "config/section.py",
        'extra="forbid"',
        'extra="ignore"',
    ),
    "neighbours": Fault(
        "modulation takes the row of the sample before",
        "ragged/modulation.py",
        "        return table.index_select(0, row)\n",
        "        return table.index_select(0, (row - 1).clamp_min(0))\n",
    ),
    "no lock": Fault(
        "two commands may train one run at the same time",
        "training/fit.py",
        "world.first(lambda: held.enter_context(exclusive(config.run_dir)))",
        "pass",
    ),
    "noise of the process": Fault(
        "the noise of an edit depends on the process that draws it",
        "sampling/prepare.py",
        "manual_seed(edit.seed)",
        "manual_seed(edit.seed + __import__('os').getpid())",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture.faults", description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help="some of them")
    parser.add_argument("--minutes", type=float, default=5, help="for each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    missed = []
    for name in options.names or FAULTS:
        begun = time.monotonic()
        found = is_found(FAULTS[name], options.minutes, options.seed)
        seconds = time.monotonic() - begun
        print(f"| {name} | {FAULTS[name].what} | {found or 'NOT FOUND'} | {seconds:.0f} s |", flush=True)
        missed += [] if found else [name]
    return int(bool(missed))


def is_found(fault: Fault, minutes: float, seed: int, *only: str) -> str:
    """The case that finds it first, of all attacks or of some; nothing if none does."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "qflux" / fault.file
        text = file.read_text()
        if text.count(fault.there) != 1:
            raise SystemExit(f"{fault.file} does not have this once: {fault.there}")
        file.write_text(text.replace(fault.there, fault.instead))
        path = os.pathsep.join([str(source), *sys.path])
        command = [sys.executable, "-m", "torture", "--stop", "--minutes", str(minutes), "--seed", str(seed)]
        command += ["--keep", str(Path(folder) / "kept"), *(["--only", *only] if only else [])]
        ended = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        wrong = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("WRONG ")]
        if not wrong and ended.returncode != 0:
            return "at once: the ground does not hold" if "the ground does not hold" in ended.stderr else ""
        return wrong[0] if wrong else ""


if __name__ == "__main__":
    sys.exit(main())
