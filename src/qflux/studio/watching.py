"""Runs as a page shows them: a line each, curves, edits over time; and what is new since it last looked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from qflux.files.jsonl import finite
from qflux.runs.folder import RunFolder
from qflux.runs.paths import RunPaths
from qflux.studio.queue import Queue
from qflux.studio.workspace import Workspace

MOST_POINTS = 600
"""Of a curve: as many as a screen has room for."""
_AFTER = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_gib", "seconds")
MEASURES = ("held_out_loss", "drift", "outside_colour", "outside_ssim", "cast", "blur", "done")


def summaries(workspace: Workspace, queue: Queue) -> list[dict[str, Any]]:
    """All runs, and those that are only asked for so far; the newest first."""
    found = {workspace.relative(run.path): run for run in workspace.run_folders()}
    lines = [(name, _summary(run)) for name, run in found.items()]
    asked = {}
    for job in queue.jobs():
        known = job.job
        if known is not None and known.kind == "train":
            asked[str(known.about.get("run"))] = job
    lines += [(name, {"name": Path(name).name, "status": "new"}) for name in asked if name not in found]
    shown = []
    for name, line in lines:
        if name in asked:
            job = asked[name]
            queued = job.job.queued if job.job else 0
            line |= {"job": job.id, "state": job.state, "stopping": job.is_stopping, "queued": queued}
            if job.state == "queued":
                line["status"] = "queued"
            elif job.state == "running" and line["status"] != "running":
                line["status"] = "finishing" if line["status"] == "finished" else "preparing"
            elif job.state == "failed" and line["status"] in ("new", "interrupted"):
                line["status"] = "failed"
        shown.append(line | {"run": name})
    order = {"running": 0, "finishing": 0, "preparing": 1, "queued": 2}
    return sorted(shown, key=lambda line: (order.get(line["status"], 3), -line.get("changed", line.get("queued", 0))))


def _summary(run: RunFolder) -> dict[str, Any]:
    last = run.steps[-1] if run.steps else {}
    changed = run.last_change
    return finite(
        {
            "name": run.name,
            "status": run.status,
            "step": last.get("step", 0),
            "total": last.get("total_steps"),
            "loss": last.get("loss"),
            "tokens_per_second": last.get("tokens_per_second"),
            "memory": last.get("peak_memory_gib"),
            "remaining": _remaining(run),
            "family": run.config.get("family"),
            "adapter": run.adapter is not None,
            "changed": changed.timestamp() if changed else 0,
        }
    )


def _remaining(run: RunFolder) -> float | None:
    """Seconds, from the last steps."""
    times = sorted(line["seconds"] for line in run.steps[-20:] if isinstance(line.get("seconds"), int | float))
    total = run.total_steps
    if not times or not total:
        return None
    return (total - run.steps[-1]["step"]) * times[len(times) // 2]


def described(run: RunFolder, workspace: Workspace) -> dict[str, Any]:
    """Everything a page shows of a run at once."""
    config = run.paths.config
    return finite(
        {
            "run": workspace.relative(run.path),
            **_summary(run),
            "curves": curves(run.steps),
            "validation": [_validation(line) for line in run.validations],
            "edits": [
                {
                    "name": edit.name,
                    "prompt": edit.prompt,
                    "controls": len(edit.controls),
                    "mask": edit.mask is not None,
                    "wanted": edit.wanted is not None,
                    "steps": [step for step, _ in edit.outputs],
                }
                for edit in run.edits
            ],
            "measured": run.measured_edits,
            "warnings": run.warnings[-50:],
            "environment": run.environment,
            "config": config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        }
    )


def curves(steps: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Points of each curve; of many steps, means of stretches."""
    found: dict[str, list[list[float]]] = {}
    for name in _AFTER:
        found[name] = _thinned([(line["step"], line.get(name)) for line in steps])
    for level in range(4):
        values = []
        for line in steps:
            levels = line.get("loss_by_level")
            values.append((line["step"], levels[level] if isinstance(levels, list) and len(levels) == 4 else None))
        found[f"level_{level + 1}"] = _thinned(values)
    return found


def _thinned(points: list[tuple[int, Any]]) -> list[list[float]]:
    known = [(step, float(value)) for step, value in points if _is_number(value)]
    stride = -(-len(known) // MOST_POINTS) or 1
    groups = [known[at : at + stride] for at in range(0, len(known), stride)]
    return [[group[-1][0], sum(value for _, value in group) / len(group)] for group in groups]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _validation(line: dict[str, Any]) -> dict[str, Any]:
    return {"step": line["step"]} | {name: line[name] for name in MEASURES if _is_number(line.get(name))}


def picture(run: RunFolder, edit: int, what: str, step: int) -> Path | None:
    """The file of a picture that a run has drawn or was given."""
    if not 0 <= edit < len(run.edits):
        return None
    history = run.edits[edit]
    if what == "output":
        return next((path for number, path in history.outputs if number == step), None)
    if what.startswith("control") and what[7:].isdigit() and int(what[7:]) < len(history.controls):
        return history.controls[int(what[7:])]
    return {"wanted": history.wanted, "mask": history.mask}.get(what)


def files(run: RunFolder) -> dict[str, Path]:
    """What may be taken away: adapters, exports, model card, report, config."""
    paths = RunPaths(run.path)
    found = {}
    for folder in (paths.adapter, paths.best, paths.exports):
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            if path.is_file() and not path.name.startswith(".") and path.resolve().is_relative_to(run.path.resolve()):
                found[str(path.relative_to(run.path))] = path
    for path in (paths.report, paths.config):
        if path.is_file():
            found[path.name] = path
    return found
