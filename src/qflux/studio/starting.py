"""From a form to a run: a config with comments for a data set, its check, its start."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from qflux.errors import ConfigError, DataError
from qflux.files.atomic import write_bytes
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
    if file.exists() and file.read_text(encoding="utf-8") != text and run.exists():
        raise ConfigError(f"a run {name} is there already, with another config", "give this one another run_name.")
    write_bytes(file, text.encode())
    return queue_run(workspace, queue, file, run, lane)


def queue_run(workspace: Workspace, queue: Queue, file: Path, run: Path, lane: str) -> JobFolder:
    """Queue a run, or its continuation: it goes on where it was."""
    if lane not in {device.lane for device in queue.devices}:
        raise DataError(f"there is no {lane} here", f"use {queue.devices[0].lane}.")
    name = workspace.relative(run)
    known = queue.of_run(name)
    if known is not None and known.state in ("queued", "running"):
        raise DataError(f"{name} is {known.state} already")
    return queue.add(Job("train", ["train", workspace.relative(file)], {"run": name}, lane))


def resume(workspace: Workspace, queue: Queue, name: str, lane: str) -> JobFolder:
    """Go on with a run from what it has saved, by the config it was started with, or by its own copy of it."""
    run = workspace.inside(name, "the run")
    file = workspace.config_file(run.name)
    if not file.is_file():
        file = workspace.run(name).paths.config
    config, problems = checked(file.read_text(encoding="utf-8"), workspace)
    if config is None:
        raise ConfigError("; ".join(problem.message for problem in problems[:5]))
    return queue_run(workspace, queue, file, run, lane)


def duplicate(workspace: Workspace, name: str) -> str:
    """The config of a run under a new name."""
    run = workspace.run(name)
    file = workspace.config_file(run.path.name)
    text = (file if file.is_file() else run.paths.config).read_text(encoding="utf-8")
    return with_value(text, "run_name", free_name(workspace, run.path.name))


def delete(workspace: Workspace, queue: Queue, name: str) -> None:
    """Delete a run and its config; never one that is running."""
    job = queue.of_run(name)
    if job is not None and job.state in ("queued", "running"):
        raise DataError(f"{name} is {job.state}", "stop it first.")
    folder = workspace.inside(name, "the run")
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
    workspace.config_file(folder.name).unlink(missing_ok=True)


def side_job(queue: Queue, workspace: Workspace, kind: str, text: str, options: list[str]) -> JobFolder:
    """A look at a config that needs no GPU: `check` or `inspect`."""
    config, problems = checked(text, workspace)
    if config is None:
        raise ConfigError("; ".join(f"{p.path}: {p.message}" if p.path else p.message for p in problems[:5]))
    folder = workspace.own / "drafts"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{kind}.yaml"
    write_bytes(file, text.encode())
    return queue.add(Job(kind, [kind, workspace.relative(file), *options], {}, SIDE))


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
