"""Files that qflux has written, spoiled: it notices, or what comes out is what would have come out."""

from __future__ import annotations

import shutil
from pathlib import Path

from torture.attacks.damage import spoiled
from torture.attacks.kills import require_run
from torture.cases import Case, Wrong, require_equal
from torture.ground import EVERY, STEPS, results


def entry(case: Case) -> None:
    """An entry or a list of the cache: training says so or is not touched by it, and `verify` finds it."""
    cache = case.copy(case.ground.root / "cache", "cache")
    config = case.ground.config(case.folder, cache={"path": str(cache)})
    files = sorted(path for part in ("entries", "samples") for path in (cache / part).rglob("*") if path.is_file())
    file = case.random.choice(files)
    _spoil(case, file, [other for other in files if other.suffix == file.suffix])
    outcome = case.require(case.run("fit", "--config", config), names=("cache", file.stem))
    if outcome.code == 0:
        require_run(case, case.folder / "runs" / "whole")
    if file.parts[-2] != "samples" and "entries" in file.parts:
        verified = case.require(case.run("cache", "verify", "--config", config))
        if verified.code == 0:
            raise Wrong(f"verify does not find {file.name}\n{verified.told}")
    case.require(case.run("cache", "--config", config), (0, 2))


def checkpoint(case: Case) -> None:
    """A file of the newest checkpoint, or all of it: the run goes on from the one before, to the same end."""
    run = _begun(case)
    newest = run / "checkpoints" / f"step-{2 * EVERY:08d}"
    file = case.random.choice(sorted(newest.iterdir()))
    if case.random.random() < 0.15:
        file.unlink()
        case.note(f"{file.name} is gone")
    else:
        _spoil(case, file, sorted(newest.iterdir()))
    outcome = case.run("fit", "--config", case.ground.config(case.folder))
    case.require(outcome, (0, 2), names=(newest.name, "checkpoint"))
    if outcome.code == 0:
        require_equal(results(run), case.ground.run, "the run")
        if newest.name not in outcome.err.replace("\n", ""):
            raise Wrong(f"nothing is said of {newest.name}\n{outcome.told}")


def run_file(case: Case) -> None:
    """A file that a run tells its story in: what is learnt does not depend on it, and the report still comes."""
    run = _begun(case)
    files = sorted(path for path in run.iterdir() if path.is_file() and path.name != "report.html")
    file = case.random.choice(files)
    _spoil(case, file, files)
    case.require(case.run("report", run))
    outcome = case.require(case.run("fit", "--config", case.ground.config(case.folder)), names=(file.name, "samples"))
    if outcome.code == 0:
        require_equal(results(run), case.ground.run, "the run")
        case.require(case.run("report", run), (0,))


def lora(case: Case) -> None:
    """A LoRA of any format: refused, or read whole; numbers in it can't be checked, names and shapes can."""
    ground = case.ground
    form = case.random.choice(sorted(ground.exported))
    file = case.folder / "lora.safetensors"
    file.write_bytes(ground.exported[form])
    _spoil(case, file, [])
    target = case.folder / "out.safetensors"
    outcome = case.run("export", "--config", ground.config(case.folder), "--lora", file, "--format", form,
                       "--output", target)  # fmt: skip
    case.require(outcome, names=(file.name,))
    if outcome.code == 0 and len(target.read_bytes()) < 0.9 * len(ground.exported[form]):
        raise Wrong(f"less comes out than was in it\n{outcome.told}")
    if outcome.code == 2 and target.exists():
        raise Wrong("something was written all the same")
    case.require_clean(case.folder)


def _begun(case: Case) -> Path:
    """The undisturbed run as it was after two checkpoints of three."""
    run = case.folder / "runs" / "whole"
    shutil.copytree(case.ground.root / "runs" / "whole", run)
    for gone in ("adapter", "best"):
        shutil.rmtree(run / gone, ignore_errors=True)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    return run


def _spoil(case: Case, file: Path, others: list[Path]) -> None:
    data = file.read_bytes()
    strangers = [other for other in others if other != file and other.read_bytes() != data]
    if strangers and case.random.random() < 0.15:
        other = case.random.choice(strangers)
        file.write_bytes(other.read_bytes())
        case.note(f"{file.name} is {other.name}")
        return
    changed, kind = spoiled(data, case.random)
    file.write_bytes(changed)
    case.note(f"{kind}: {file.name}")
