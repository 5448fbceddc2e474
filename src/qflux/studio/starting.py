"""From a form to a run: a config with comments for a data set, its check, its start."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from qflux.errors import ConfigError, DataError
from qflux.files.atomic import write_bytes
from qflux.files.hashing import key_of
from qflux.start.look import look
from qflux.start.machine import this_machine
from qflux.start.presets import choose_model, preset
from qflux.start.writer import Plan, config_text
from qflux.studio.drafts import checked, with_value
from qflux.studio.library import DataSet
from qflux.studio.processes import Job, JobFolder
from qflux.studio.queue import SIDE, Queue
from qflux.studio.workspace import Workspace


def draft(workspace: Workspace, data: DataSet, asked: dict[str, Any]) -> str:
    """The config for a data set, as `qflux init` would write it."""
    machine = this_machine()
    family, model = (str(asked[key]) if asked.get(key) else None for key in ("family", "model"))
    chosen = choose_model(model, family, machine, has_controls=True)
    source = {
        key: workspace.relative(Path(value)) if key in ("path", "root", "corrections") else value
        for key, value in data.config_source().items()
    }
    seen = look(data.config_source(), b"", chosen.family)
    name = free_name(workspace, str(asked.get("name") or data.root.name))
    fitting = preset(chosen, machine, len(seen.samples))
    plan = Plan(data.root, source, seen, chosen, machine, fitting, name)
    return config_text(plan, Path(f"{name}.yaml"))


def free_name(workspace: Workspace, wanted: str) -> str:
    """A name that no run and no config has."""
    base = re.sub(r"[^\w.-]+", "-", wanted).strip(".-")[:80] or "run"
    base = "run" if base == "cache" else base
    name, number = base, 1
    while (workspace.runs / name).exists() or workspace.config_file(name).exists():
        number += 1
        name = f"{base}-{number}"
    return name


def start(workspace: Workspace, queue: Queue, text: str, lane: str) -> JobFolder:
    """Write a config and queue its run; an error if it is not one that may be run here."""
    config, problems = checked(text, workspace)
    if config is None:
        raise ConfigError("; ".join(f"{p.path}: {p.message}" if p.path else p.message for p in problems[:5]))
    name = config.run_dir.name
    file = workspace.config_file(name)
    run = workspace.inside(config.run_dir, "the run")
    require_free(workspace, queue, run, lane)
    if file.exists() and file.read_bytes() != text.encode() and (run.exists() or not _is_ours(workspace, file)):
        raise ConfigError(f"{file.name} is there already, and says something else", "give this run another run_name.")
    write_bytes(file, text.encode())
    _copy_of(workspace, file).parent.mkdir(parents=True, exist_ok=True)
    write_bytes(_copy_of(workspace, file), text.encode())
    return queue_run(workspace, queue, file, run, lane)


def _copy_of(workspace: Workspace, file: Path) -> Path:
    """What the studio wrote into a config, to tell whether it is still that."""
    return workspace.own / "configs" / file.name


def _is_ours(workspace: Workspace, file: Path) -> bool:
    """The studio has written a config, and nobody has changed it since."""
    copy = _copy_of(workspace, file)
    return copy.is_file() and file.is_file() and copy.read_bytes() == file.read_bytes()


def _config_of(workspace: Workspace, run: Path) -> Path | None:
    """The config beside the runs that is a run's own: another one may have its name."""
    file = workspace.config_file(run.name)
    if not file.is_file():
        return None
    config, _ = checked(file.read_text(encoding="utf-8", errors="replace"), workspace)
    return file if config is not None and workspace.inside(config.run_dir) == run else None


def require_free(workspace: Workspace, queue: Queue, run: Path, lane: str) -> None:
    """An error if a run is queued or running already, or if there is no such device."""
    if lane not in {device.lane for device in queue.devices}:
        raise DataError(f"there is no {lane} here", f"use {queue.devices[0].lane}.")
    name = workspace.relative(run)
    known = queue.of_run(name)
    if known is not None and known.state in ("queued", "running"):
        raise DataError(f"{name} is {known.state} already")


def queue_run(workspace: Workspace, queue: Queue, file: Path, run: Path, lane: str) -> JobFolder:
    """Queue a run, or its continuation: it goes on where it was."""
    require_free(workspace, queue, run, lane)
    return queue.add(Job("train", ["train", workspace.relative(file)], {"run": workspace.relative(run)}, lane))


def resume(workspace: Workspace, queue: Queue, name: str, lane: str) -> JobFolder:
    """Go on with a run from what it has saved, by the config it was started with, or by its own copy of it."""
    run = workspace.inside(name, "the run")
    file = _config_of(workspace, run) or workspace.run(name).paths.config
    config, problems = checked(file.read_text(encoding="utf-8"), workspace)
    if config is None:
        raise ConfigError("; ".join(problem.message for problem in problems[:5]))
    return queue_run(workspace, queue, file, run, lane)


def duplicate(workspace: Workspace, name: str) -> str:
    """The config of a run under a new name."""
    run = workspace.run(name)
    file = _config_of(workspace, run.path.resolve()) or run.paths.config
    text = file.read_text(encoding="utf-8")
    return with_value(text, "run_name", free_name(workspace, run.path.name))


def delete(workspace: Workspace, queue: Queue, name: str) -> None:
    """Delete a run, and its config if the studio wrote it; never one that is running."""
    job = queue.of_run(name)
    if job is not None and job.state in ("queued", "running"):
        raise DataError(f"{name} is {job.state}", "stop it first.")
    folder = workspace.inside(name, "the run")
    config = _config_of(workspace, folder)
    if folder.exists() or job is None:
        run = workspace.run(name)
        if run.status == "running":
            raise DataError(f"{name} is running", "stop it first.")
        aside = workspace.own / "deleted" / run.path.name
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(parents=True, exist_ok=True)
        run.path.rename(aside)  # at once, or not at all
        shutil.rmtree(aside, ignore_errors=True)
    queue.forget(name)
    if config is not None and _is_ours(workspace, config):
        config.unlink()


def side_job(
    queue: Queue, workspace: Workspace, kind: str, text: str, options: list[str], about: dict[str, Any] | None = None
) -> JobFolder:
    """A look at a config that needs no GPU: `check` or `inspect`."""
    config, problems = checked(text, workspace)
    if config is None:
        raise ConfigError("; ".join(f"{p.path}: {p.message}" if p.path else p.message for p in problems[:5]))
    folder = workspace.own / "drafts"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{kind}-{key_of(text)[:16]}.yaml"
    write_bytes(file, text.encode())
    return queue.add(Job(kind, [kind, workspace.relative(file), *options], about or {}, SIDE))


def plan_of(job: JobFolder) -> list[dict[str, str]]:
    """What `check --json` said; nothing if it is not done."""
    text = job.log(1 << 20)
    start = text.find("{\n")
    try:
        found, _ = json.JSONDecoder().raw_decode(text[start:]) if start >= 0 else ({}, 0)
    except ValueError:
        return []
    checks = found.get("checks", []) if isinstance(found, dict) else []
    return [check for check in checks if isinstance(check, dict)]
