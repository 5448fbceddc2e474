"""Reads what a run has left in its folder: of a finished run, a running one, or one that was killed."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from qflux.errors import DataError
from qflux.files.jsonl import GrowingLines, read_lines
from qflux.runs.ledger import Coverage, coverage, read_ledger
from qflux.runs.metrics import StepReport, ValidationReport, parsed
from qflux.runs.paths import RunPaths, steps_of


@dataclass(frozen=True)
class EditHistory:
    """An edit over time."""

    name: str
    prompt: str
    controls: list[Path]
    mask: Path | None
    wanted: Path | None
    outputs: list[tuple[int, Path]]
    """Step and picture, oldest first."""


def _points(values: Any) -> list[tuple[float, float]]:
    listed = values if isinstance(values, list) else []
    pairs = [pair for pair in listed if isinstance(pair, list) and len(pair) == 2]
    return [(float(x), float(y)) for x, y in pairs if all(type(value) in (int, float) for value in (x, y))]


def _controls(item: dict[str, Any]) -> list[str]:
    """The names that a description gives its controls, in their order: control, control 2, …"""
    return sorted((kind for kind in item if kind.split(" ")[0] == "control"), key=lambda kind: (len(kind), kind))


@dataclass(frozen=True)
class RunFolder:
    """Reads what is there; what is torn or missing is left out."""

    path: Path
    label: str = ""
    """What it is called where the folder's name does not tell it from others."""
    metrics: GrowingLines | None = field(default=None, compare=False, repr=False)
    """Its metrics as far as they were read before, for whoever looks at a running run again and again."""

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise DataError(f"there is no run at {self.path}", "give the folder of a run: <output_dir>/<run_name>.")
        if not self.paths.is_run:
            raise DataError(f"{self.path} is no run: it has no config.yaml", "give <output_dir>/<run_name>.")

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.path)

    @property
    def name(self) -> str:
        return self.label or self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            values = yaml.safe_load(self.paths.config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """A line per step, as it stands in the file: some may be damaged, or of another version."""
        lines = self.metrics.read() if self.metrics is not None else read_lines(self.paths.metrics)
        return [line for line in lines if isinstance(line.get("step"), int)]

    @property
    def losses(self) -> list[float]:
        """Of all steps whose loss is finite."""
        return [float(line["loss"]) for line in self.steps if isinstance(line.get("loss"), int | float)]

    @cached_property
    def step_reports(self) -> list[StepReport]:
        """The same, of those that are complete."""
        return [report for line in self.steps if (report := parsed(StepReport, line))]

    @cached_property
    def validations(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.paths.validation) if isinstance(line.get("step"), int)]

    @cached_property
    def validation_reports(self) -> list[ValidationReport]:
        return [report for line in self.validations if (report := parsed(ValidationReport, line))]

    @cached_property
    def measured_edits(self) -> dict[str, dict[str, Any]]:
        """What the last validation that measured any says of each edit, by its name."""
        listed = [line["edits"] for line in self.validations if isinstance(line.get("edits"), list)]
        newest = [item for item in listed[-1] if isinstance(item, dict)] if listed else []
        return {str(item.get("name")): item for item in newest}

    @cached_property
    def warnings(self) -> list[str]:
        return [str(line.get("text", "")) for line in read_lines(self.paths.warnings)]

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _json(self.paths.environment)

    @cached_property
    def noise_levels(self) -> dict[str, list[tuple[float, float]]]:
        """How often which noise level is drawn, by name of the curve; what is damaged is left out."""
        curves = _json(self.paths.noise_levels).get("curves")
        named = [curve for curve in curves if isinstance(curve, dict)] if isinstance(curves, list) else []
        return {str(curve.get("name")): points for curve in named if (points := _points(curve.get("points")))}

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """What the ledger says about each sample."""
        return [line for line in read_ledger(self.paths.ledger) if line["kind"] == "sample"]

    @cached_property
    def coverage(self) -> Coverage:
        return coverage(self.paths.ledger)

    @cached_property
    def edits(self) -> list[EditHistory]:
        """What was drawn at the checkpoints, in the order it was drawn first."""
        outputs: dict[tuple[str, str], list[tuple[int, Path]]] = defaultdict(list)
        given: dict[tuple[str, str], tuple[list[Path], Path | None, Path | None]] = {}
        for folder in sorted(self.paths.samples.glob("step-*")):
            steps_done = steps_of(folder)
            if not folder.is_dir() or steps_done is None:
                continue
            described = _json(folder / "edits.json").get("edits")
            for item in described if isinstance(described, list) else []:
                if not isinstance(item, dict):
                    continue
                key = str(item.get("name")), str(item.get("prompt"))
                picture = self._picture(folder, item.get("output"))
                if picture:
                    outputs[key].append((steps_done, picture))
                    given[key] = (
                        [file for kind in _controls(item) if (file := self._picture(folder, item[kind]))],
                        self._picture(folder, item.get("mask")),
                        self._picture(folder, item.get("wanted")),
                    )
        return [
            EditHistory(*key, controls, mask, wanted, outputs[key]) for key, (controls, mask, wanted) in given.items()
        ]

    @property
    def last_change(self) -> datetime | None:
        """When the last step was written down."""
        try:
            return datetime.fromtimestamp(self.paths.metrics.stat().st_mtime)
        except OSError:
            return None

    @property
    def adapter(self) -> Path | None:
        """The finished LoRA."""
        return self.paths.adapter_file if self.paths.adapter_file.is_file() else None

    @property
    def total_steps(self) -> int | None:
        return self.steps[-1].get("total_steps") if self.steps else None

    @property
    def status(self) -> str:
        """finished, running, or interrupted."""
        done = self.steps[-1]["step"] if self.steps else 0
        if done and done == self.total_steps:
            return "finished"
        return "running" if self._is_running() else "interrupted"

    def _is_running(self) -> bool:
        """Whether a process holds the run's lock. It is looked up, not tried: a trial could stop a run that starts."""
        try:
            lock = self.paths.lock.stat()
            held = Path("/proc/locks").read_text()
        except OSError:
            return False
        place = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
        return any(" FLOCK " in line and f" {place} " in line for line in held.splitlines())

    def _picture(self, folder: Path, name: Any) -> Path | None:
        """A file that a description names; never one outside the run."""
        if not isinstance(name, str):
            return None
        path = (folder / name).resolve()
        return path if path.is_file() and path.is_relative_to(self.path.resolve()) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
