"""Everything a run tells: files under its folder, trackers, and who listens. Only the first process has one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import yaml
from PIL import Image

from qflux.config import Config
from qflux.data.dataset import Dataset
from qflux.data.lint.alignment import Drift
from qflux.files.atomic import sweep, write_bytes, write_json
from qflux.files.jsonl import append_line
from qflux.measures.edit import EditMeasures, means, perceptual_means
from qflux.models.registry import facts_of
from qflux.pictures.drawing import GridRow, edit_grid, write_png
from qflux.runs.environment import environment
from qflux.runs.ledger import Ledger
from qflux.runs.metrics import Listener, StepFile, StepReport, ValidationReport
from qflux.runs.paths import RunPaths
from qflux.runs.trackers import Tracker, open_trackers

if TYPE_CHECKING:
    from qflux.data.sample import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrawnEdit:
    """A held-out sample or an own image, edited. What is known is shown as it was given, at its training size."""

    name: str
    prompt: str
    output: Image.Image
    wanted: Image.Image | None = None
    controls: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None
    drift: Drift | None = None
    """Against the first control, outside the mask."""
    measures: EditMeasures = field(default_factory=EditMeasures)

    @property
    def pictures(self) -> dict[str, Image.Image]:
        """Everything there is to see, by what it is."""
        controls = {"control" if n == 1 else f"control {n}": image for n, image in enumerate(self.controls, start=1)}
        rest = {"mask": self.mask, "output": self.output, "wanted": self.wanted}
        return controls | {kind: image for kind, image in rest.items() if image is not None}


@dataclass(frozen=True)
class HeldOut:
    """The held-out loss at one checkpoint."""

    loss: float
    """Mean over all target tokens of all held-out samples at all noise levels."""
    loss_by_level: list[float]
    """The same for each noise level, the least noise first."""


class Journal:
    """Writes the files of `RunPaths` while a run goes.

    A resumed run first drops the lines of steps that it is about to do again. `levels` are curves that say how often
    which noise level is drawn.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        levels: Mapping[str, Sequence[tuple[float, float]]],
        steps_done: int,
        listener: Listener | None,
    ) -> None:
        self._paths = paths = RunPaths(config.run_dir)
        for folder in (paths.root, paths.checkpoints, paths.samples, *paths.samples.glob("step-*/")):
            sweep(folder)  # what a kill has left
        write_bytes(paths.config, yaml.safe_dump(config.dump(), sort_keys=False).encode())
        write_json(paths.environment, environment())
        write_json(paths.noise_levels, {"curves": [{"name": name, "points": curve} for name, curve in levels.items()]})
        self._metrics = StepFile(paths.metrics, steps_done)
        self._validation = StepFile(paths.validation, steps_done)
        pixels = facts_of(config.family).pixels_per_token
        self._ledger = Ledger(paths.ledger, dataset.training, dataset.faults, steps_done, pixels)
        self._warnings = _WarningFile(paths.warnings, keep=steps_done > 0)
        logging.getLogger("qflux").addHandler(self._warnings)
        self._trackers = list(open_trackers(config, steps_done)) if config.train.trackers else []
        self._listener = listener

    def step(self, report: StepReport, samples: Iterable[Sample]) -> None:
        """A step is done, on these samples."""
        self._metrics.append(asdict(report))
        noises = report.noises // report.samples
        self._ledger.record(report.step, report.epoch, samples, noises, left_out=report.skipped)
        self._track(lambda tracker: tracker.log(report.step, report.numbers()))
        if self._listener:
            self._listener(report)

    def validation(self, steps_done: int, found: HeldOut | None, edits: Sequence[DrawnEdit]) -> None:
        """What was found after so many steps, and the pictures drawn then."""
        certain = [edit.drift.distance for edit in edits if edit.drift is not None and edit.drift.is_certain]
        report = ValidationReport(
            step=steps_done,
            held_out_loss=found.loss if found else None,
            held_out_loss_by_level=found.loss_by_level if found else None,
            drifts=[{"name": edit.name, **edit.drift.line()} for edit in edits if edit.drift is not None],
            drift=fmean(certain) if certain else None,
            edits=[{"name": edit.name, **line} for edit in edits if (line := edit.measures.line())],
            **means([edit.measures for edit in edits]),
            perceptual=perceptual_means([edit.measures for edit in edits]),
        )
        self._validation.append(report.line())
        picture = self._draw(steps_done, edits) if edits else None
        self._track(lambda tracker: tracker.log(steps_done, report.numbers()))
        if picture:
            self._track(lambda tracker: tracker.image(steps_done, "validation/edits", picture))

    @property
    def newest_picture(self) -> Path | None:
        """The edits of the last checkpoint that drew some."""
        pictures = sorted(self._paths.samples.glob("step-*.png"))
        return pictures[-1] if pictures else None

    def close(self) -> None:
        self._track(lambda tracker: tracker.close())
        logging.getLogger("qflux").removeHandler(self._warnings)

    def _track(self, action: Callable[[Tracker], None]) -> None:
        """A tracker that fails is left alone from then on; it must not cost a run."""
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                logger.warning("%s has failed and is left out from now on: %s", type(tracker).__name__, error)

    def _draw(self, steps_done: int, edits: Sequence[DrawnEdit]) -> Path:
        """The sheet of all edits side by side, and a folder with each output by itself."""
        rows, described = [], []
        samples, own = self._paths.samples, self._paths.sample_folder(steps_done)
        for number, edit in enumerate(edits):
            images = edit.pictures
            rows.append(GridRow(f"{edit.name}: {edit.prompt}", images))
            plain = re.sub(r"[^\w.-]+", "_", Path(edit.name).stem)[-60:] or "edit"
            name = f"{number:02d}-{plain}.png"
            files = {kind: f"{kind.replace(' ', '-')}/{name}" for kind in images}
            files["output"] = f"{own.name}/{name}"
            for kind, image in images.items():
                write_png(samples / files[kind], image)
            described.append({"name": edit.name, "prompt": edit.prompt} | {k: f"../{v}" for k, v in files.items()})
        write_json(own / "edits.json", {"edits": described})
        largest = max(max(edit.output.size) for edit in edits)
        further = sorted({kind for row in rows for kind in row.images if kind.startswith("control ")})
        columns = [
            kind for kind in ("control", *further, "mask", "output", "wanted") if any(kind in r.images for r in rows)
        ]
        return write_png(self._paths.sample_sheet(steps_done), edit_grid(rows, columns, 384 / largest))


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
            append_line(self._path, {"text": text})
        except OSError:
            self.handleError(record)
