"""What a run has left in its folder, for reports: of a finished run, a running one, or one that was killed."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from qflux.files.jsonl import read_lines
from qflux.errors import DataError
from qflux.runs.ledger import Coverage, coverage, read_ledger


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


def _controls(item: dict[str, Any]) -> list[str]:
    """The names that a description gives its controls, in their order: control, control 2, …"""
    return sorted((kind for kind in item if kind.split(" ")[0] == "control"), key=lambda kind: (len(kind), kind))


def is_run(folder: Path) -> bool:
    """Whether a run has been started in a folder."""
    return (folder / "config.yaml").is_file()


@dataclass(frozen=True)
class RunFolder:
    """Reads what is there; what is torn or missing is left out."""

    path: Path
    label: str = ""
    """What it is called where the folder's name does not tell it from others."""

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise DataError(f"there is no run at {self.path}", "give the folder of a run: <output_dir>/<run_name>.")
        if not is_run(self.path):
            raise DataError(f"{self.path} is no run: it has no config.yaml", "give <output_dir>/<run_name>.")

    @property
    def name(self) -> str:
        return self.label or self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            values = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl`."""
        return [line for line in self._lines("metrics.jsonl") if isinstance(line.get("step"), int)]

    @cached_property
    def validations(self) -> list[dict[str, Any]]:
        return [line for line in self._lines("validation.jsonl") if isinstance(line.get("step"), int)]

    @cached_property
    def warnings(self) -> list[str]:
        return [str(line.get("text", "")) for line in self._lines("warnings.jsonl")]

    @cached_property
    def environment(self) -> dict[str, Any]:
        return self._json("environment.json")

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """What the ledger says about each sample."""
        return [line for line in read_ledger(self.path / "ledger.jsonl") if line["kind"] == "sample"]

    @cached_property
    def coverage(self) -> Coverage:
        return coverage(self.path / "ledger.jsonl")

    @cached_property
    def edits(self) -> list[EditHistory]:
        """What was drawn at the checkpoints, in the order it was drawn first."""
        outputs: dict[tuple[str, str], list[tuple[int, Path]]] = defaultdict(list)
        given: dict[tuple[str, str], tuple[list[Path], Path | None, Path | None]] = {}
        for folder in sorted((self.path / "samples").glob("step-*")):
            if not folder.is_dir() or not folder.name[5:].isdigit():
                continue
            described = self._json(folder.relative_to(self.path) / "edits.json").get("edits")
            for item in described if isinstance(described, list) else []:
                if not isinstance(item, dict):
                    continue
                key = str(item.get("name")), str(item.get("prompt"))
                picture = self._picture(folder, item.get("output"))
                if picture:
                    outputs[key].append((int(folder.name[5:]), picture))
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
            return datetime.fromtimestamp((self.path / "metrics.jsonl").stat().st_mtime)
        except OSError:
            return None

    @property
    def adapter(self) -> Path | None:
        """The finished LoRA."""
        file = self.path / "adapter" / "pytorch_lora_weights.safetensors"
        return file if file.is_file() else None

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
            lock = (self.path / ".lock").stat()
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

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        return read_lines(self.path / name)

    def _json(self, name: str | Path) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}
