"""Everything a run tells: files under its folder, trackers, and who listens. Only the first process has one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from PIL import Image

from qflux.adapters.files import Record
from qflux.adapters.publish import write_card
from qflux.config import Config
from qflux.data.plan import PlannedStep
from qflux.files.atomic import write_bytes, write_json
from qflux.models import get_family
from qflux.runs.environment import environment
from qflux.report.page import write_report
from qflux.pictures.drawing import GridRow, edit_grid, write_png
from qflux.training.encode import PlannedSet
from qflux.runs.ledger import Ledger
from qflux.runs.metrics import (LineFile, Listener, StepReport, Tracker)
from qflux.runs.trackers import open_trackers
from qflux.training.validation import DrawnEdit, Validation, drifts

logger = logging.getLogger(__name__)


class _WarningFile(logging.Handler):
    """Warnings of a run, for its report; each text once."""

    def __init__(self, path: Path, keep: bool) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._seen: set[str] = set()
        if not keep:
            path.unlink(missing_ok=True)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text in self._seen:
            return
        self._seen.add(text)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"text": text}) + "\n")
        except OSError:
            self.handleError(record)


class Journal:
    """Writes `config.yaml`, `environment.json`, `metrics.jsonl`, `validation.jsonl`, `ledger.jsonl`, `warnings.jsonl`
    and `samples/`; at the end `report.html`, made of them.

    A resumed run first drops the lines of steps that it is about to do again.
    """

    def __init__(self, config: Config, planned: PlannedSet, done: int, listener: Listener | None) -> None:
        folder = config.run_dir
        write_bytes(folder / "config.yaml", yaml.safe_dump(config.dump(), sort_keys=False).encode())
        write_json(folder / "environment.json", environment())
        self._config = config
        self._folder = folder
        self._metrics = LineFile(folder / "metrics.jsonl", done)
        self._validation = LineFile(folder / "validation.jsonl", done)
        self._ledger = Ledger(folder / "ledger.jsonl", planned.training, planned.faults, done)
        self._warnings = _WarningFile(folder / "warnings.jsonl", keep=done > 0)
        logging.getLogger("qflux").addHandler(self._warnings)
        self._trackers = list(open_trackers(config, done))
        self._listener = listener

    def step(self, report: StepReport, step: PlannedStep) -> None:
        self._metrics.append(asdict(report))
        self._ledger.record(report.step, step, left_out=report.skipped)
        self._track(lambda tracker: tracker.log(report.step, report.numbers()))
        if self._listener:
            self._listener(report)

    def validation(self, done: int, found: Validation | None, edits: Sequence[DrawnEdit]) -> None:
        """What was found after `done` steps, and the pictures drawn then."""
        moved = list(drifts(edits))
        distances = [edit.drift.distance for edit in edits if edit.drift is not None and edit.drift.is_certain]
        line: dict[str, Any] = {"step": done}
        if found is not None:
            line |= {"held_out_loss": found.loss, "held_out_loss_by_level": found.loss_by_level}
        if moved:
            line["drifts"] = moved
        if distances:
            line["drift"] = fmean(distances)
        self._validation.append(line)
        numbers = {f"validation/{key}": value for key, value in line.items() if isinstance(value, float)}
        picture = self._draw(done, edits) if edits else None
        self._track(lambda tracker: tracker.log(done, numbers))
        if picture:
            self._track(lambda tracker: tracker.image(done, "validation/edits", picture))

    def card(self, adapter: Path) -> None:
        """`README.md` beside the adapter, with the newest edits."""
        pictures = sorted((self._folder / "samples").glob("step-*.png"))
        record, family = Record.of(self._config), get_family(self._config.family)
        write_card(adapter.parent, record, family, adapter.name, pictures[-1] if pictures else None)

    def close(self) -> None:
        self._track(lambda tracker: tracker.close())
        logging.getLogger("qflux").removeHandler(self._warnings)
        try:
            write_report([self._folder], self._folder / "report.html")
        except Exception as error:  # a report must not cost a run
            logger.warning("the report can't be written: %s", error)

    def _track(self, action: Callable[[Tracker], None]) -> None:
        """A tracker that fails is left alone from then on; it must not cost a run."""
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                logger.warning("%s has failed and is left out from now on: %s", type(tracker).__name__, error)

    def _draw(self, done: int, edits: Sequence[DrawnEdit]) -> Path:
        """`samples/step-N.png`, all side by side, and `samples/step-N/`, each output by itself."""
        rows, described = [], []
        samples = self._folder / "samples"
        for number, edit in enumerate(edits):
            images = _pictures(edit)
            rows.append(GridRow(f"{edit.name}: {edit.prompt}", images))
            plain = re.sub(r"[^\w.-]+", "_", Path(edit.name).stem)[-60:] or "edit"
            name = f"{number:02d}-{plain}.png"
            files = {kind: f"{kind.replace(' ', '-')}/{name}" for kind in images}
            files["output"] = f"step-{done:08d}/{name}"
            for kind, image in images.items():
                write_png(samples / files[kind], image)
            described.append({"name": edit.name, "prompt": edit.prompt} | {k: f"../{v}" for k, v in files.items()})
        write_json(samples / f"step-{done:08d}" / "edits.json", {"edits": described})
        largest = max(max(edit.output.size) for edit in edits)
        further = sorted({kind for row in rows for kind in row.images if kind.startswith("control ")})
        columns = [
            kind for kind in ("control", *further, "mask", "output", "wanted") if any(kind in r.images for r in rows)
        ]
        return write_png(samples / f"step-{done:08d}.png", edit_grid(rows, columns, 384 / largest))


def _pictures(edit: DrawnEdit) -> dict[str, Image.Image]:
    """Everything there is to see of an edit, by what it is."""
    controls = {"control" if n == 1 else f"control {n}": image for n, image in enumerate(edit.controls, start=1)}
    rest = {"mask": edit.mask, "output": edit.output, "wanted": edit.wanted}
    return controls | {kind: image for kind, image in rest.items() if image is not None}
