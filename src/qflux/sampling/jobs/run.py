"""Doing a list of jobs: batches by token budget, each image made once, bad jobs named and left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from qflux.adapters.attach import Weighted
from qflux.config import Config
from qflux.config.sampling import PredictSettings
from qflux.data.images.decode import ImageFile, load_rgb, load_rgba, read_facts, to_rgb
from qflux.data.packing import fitting
from qflux.errors import DataError, QfluxError
from qflux.files.atomic import sweep, write_bytes
from qflux.files.hashing import key_of
from qflux.files.locks import exclusive
from qflux.pictures.drawing import GridRow, edit_grid
from qflux.sampling.jobs.gallery import Gallery, encoded, read_notes
from qflux.sampling.jobs.lists import SHEET, Job, JobList
from qflux.sampling.predictor import Edit, Predictor, provenance
from qflux.sampling.sampler import Prepared

SHEET_JOBS = 8
"""Jobs on the contact sheet; their images before the adapters are made too."""

Progress = Callable[[int, int, str], None]


@dataclass
class JobsReport:
    """What became of a list."""

    made: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    """Those that were there already."""
    problems: list[str] = field(default_factory=list)
    sheet: Path | None = None

    def require_all(self, listed: JobList, output: Path) -> None:
        """An error that names every job that could not be done."""
        problems = [*listed.problems, *self.problems]
        if not problems:
            return
        lines = "".join(f"\n  - {problem}" for problem in problems)
        total, done = len(listed.jobs) + len(listed.problems), len(self.made) + len(self.kept)
        headline = f"{total - done} of {total} jobs can't be done; the other {done} are in {output}"
        raise DataError(f"{headline if done else 'no job can be done'}:{lines}", "fix them and run again.")


def predict_one(
    config: Config,
    predictor: Predictor,
    adapters: Sequence[Weighted],
    edit: Edit,
    output: Path,
    on_step: Callable[[int, int], None] | None = None,
) -> Image.Image:
    """Make one edit, and write it with everything it was made from."""
    sweep(output.parent, output.name)
    (result,) = predictor([edit], on_step=on_step)
    notes = {
        "prompt": edit.prompt,
        "prompt_2": edit.prompt_2,
        "negative_prompt": predictor.prepare.negative_prompt(edit.negative_prompt),
        "seed": edit.seed,
        "size": [result.height, result.width],
        **provenance(config, predictor, adapters),
    }
    write_bytes(output, encoded(result, output.suffix.lower(), notes))
    return result


def opened(job: Job, settings: PredictSettings) -> Edit:
    """One job with its images, and the settings for what it leaves open."""
    return Edit(
        controls=tuple(load_rgba(ImageFile(path)) for path in job.images),
        prompt=job.prompt,
        prompt_2=job.prompt_2,
        negative_prompt=settings.negative_prompt if job.negative_prompt is None else job.negative_prompt,
        seed=settings.seed if job.seed is None else job.seed,
        size=settings.size if job.size is None else job.size,
    )


def predict_many(
    config: Config,
    predictor: Predictor,
    adapters: Sequence[Weighted],
    jobs: Sequence[Job],
    output: Path,
    negative_prompt: str | None,
    progress: Progress,
) -> JobsReport:
    """Make every image of a list that is not in the folder `output` yet."""
    settings = config.predict
    negative = settings.negative_prompt if negative_prompt is None else negative_prompt
    with exclusive(output):
        run = JobRun(predictor, output, provenance(config, predictor, adapters), settings)
        return run(jobs, negative, progress)


@dataclass(frozen=True)
class _Checked:
    """A job that can be done, as far as can be told before its images are decoded."""

    job: Job
    seed: int
    key: str
    tokens: int
    is_there: bool
    """Its image was made already."""


class JobRun:
    """A predictor, a place for images, and what they depend on besides the jobs."""

    def __init__(
        self, predictor: Predictor, folder: Path, circumstances: dict[str, Any], settings: PredictSettings
    ) -> None:
        """`circumstances` are written into every image: the model, the adapters with their weights."""
        self._predictor = predictor
        self._gallery = Gallery(folder)
        self._circumstances = circumstances | predictor.settings()
        self._seed = settings.seed
        self._max_tokens = settings.max_tokens
        self._batch_size = settings.batch_size
        self._size = settings.size

    def __call__(self, jobs: Sequence[Job], negative_prompt: str | None, progress: Progress) -> JobsReport:
        """Make every image that is not there yet."""
        report = JobsReport()
        sheet = self._gallery.path(SHEET)
        if sheet.exists() and not read_notes(sheet):
            raise DataError(f"{sheet} is there already, and was not made by qflux", "choose another --output.")
        checked = [found for job in jobs if (found := self._check(job, negative_prompt, report)) is not None]
        done = 0
        for batch in self._batches(checked):
            missing = [item for item in batch if not item.is_there]
            report.kept += [self._gallery.path(item.job.name) for item in batch if item not in missing]
            if missing:
                made = self._make(batch, missing, report, lambda note, done=done: progress(done, len(checked), note))  # type: ignore[misc]
                wanted = {item.job.name for item in missing}
                images = {name: content for name, content in made.items() if name in wanted}
                if images:
                    self._gallery.add(key_of([item.key for item in batch])[:16], images)
                report.made += [self._gallery.path(name) for name in images]
            done += len(batch)
            progress(done, len(checked), "images")
        report.sheet = self._sheet([item for item in checked if self._gallery.path(item.job.name).exists()])
        return report

    def _check(self, job: Job, negative_prompt: str | None, report: JobsReport) -> _Checked | None:
        job = job if job.size is not None else replace(job, size=self._size)
        try:
            facts = [read_facts(ImageFile(path)) for path in job.images]
            tokens = self._predictor.prepare.tokens([fact.size for fact in facts], job.size)
        except QfluxError as error:
            report.problems.append(f"{job.name}: {error.problem}")
            return None
        seed = self._seed if job.seed is None else job.seed
        given = negative_prompt if job.negative_prompt is None else job.negative_prompt
        job = replace(job, negative_prompt=self._predictor.prepare.negative_prompt(given))
        content: list[Any] = [
            job.prompt,
            job.prompt_2,
            job.negative_prompt,
            seed,
            job.size,
            [fact.hash for fact in facts],
        ]
        key = key_of("edit", content, self._circumstances)
        try:
            return _Checked(job, seed, key, tokens, self._gallery.has(job.name, key))
        except DataError as error:
            report.problems.append(f"{job.name}: {error.problem}; {error.remedy}")
            return None

    def _batches(self, checked: Sequence[_Checked]) -> list[list[_Checked]]:
        """In the order of the list, as many as fit: the same batches whatever is done already."""
        places = fitting([item.tokens for item in checked], self._max_tokens, self._batch_size)
        return [[checked[place] for place in batch] for batch in places]

    def _make(
        self, batch: Sequence[_Checked], missing: Sequence[_Checked], report: JobsReport, step: Callable[[str], None]
    ) -> dict[str, tuple[Image.Image, dict[str, Any]]]:
        prepared: dict[str, Prepared] = {}
        items: dict[str, _Checked] = {}
        for item in batch:
            try:
                prepared[item.job.name] = self._predictor.prepare(self._edit(item))
                items[item.job.name] = item
            except QfluxError as error:
                report.problems.append(f"{item.job.name}: {error.problem}")
        if not any(item.job.name in prepared for item in missing):
            return {}
        images = self._predictor.draw(
            list(prepared.values()), on_step=lambda done, total: step(f"step {done}/{total} of {len(prepared)} images")
        )
        return {name: (image, self._notes(items[name], image)) for name, image in zip(prepared, images, strict=True)}

    def _edit(self, item: _Checked) -> Edit:
        job = item.job
        controls = tuple(load_rgba(ImageFile(path)) for path in job.images)
        return Edit(controls, job.prompt, job.prompt_2, job.negative_prompt, item.seed, job.size)

    def _notes(self, item: _Checked, image: Image.Image) -> dict[str, Any]:
        return {
            "prompt": item.job.prompt,
            "prompt_2": item.job.prompt_2,
            "negative_prompt": item.job.negative_prompt,
            "seed": item.seed,
            "size": [image.height, image.width],
            "key": item.key,
            **self._circumstances,
        }

    def _sheet(self, done: Sequence[_Checked]) -> Path | None:
        """Control, before and after of the first jobs side by side. Before is the base without its adapters."""
        shown = done[:SHEET_JOBS]
        if not shown:
            return None
        sheet, key = self._gallery.path(SHEET), key_of("sheet", [item.key for item in shown])
        if read_notes(sheet).get("key") == key:
            return sheet
        before: list[Image.Image | None] = [None] * len(shown)
        if self._circumstances.get("adapters"):
            with self._predictor.without_adapters():
                before = [
                    image
                    for batch in self._batches(shown)
                    for image in self._predictor.draw([self._predictor.prepare(self._edit(item)) for item in batch])
                ]
        rows = []
        for item, plain in zip(shown, before, strict=True):
            images = {"after": to_rgb(Image.open(self._gallery.path(item.job.name)))}
            if plain is not None:
                images["before"] = to_rgb(plain)
            if item.job.images:
                control = load_rgb(ImageFile(item.job.images[0]))
                images["control"] = (
                    control.resize(images["after"].size) if _alike(control, images["after"]) else control
                )
            rows.append(GridRow(f"{item.job.name}: {item.job.prompt}", images))
        columns = [name for name in ("control", "before", "after") if any(name in row.images for row in rows)]
        largest = max(max(image.size) for row in rows for image in row.images.values())
        picture = edit_grid(rows, columns, min(1.0, 384 / largest))
        write_bytes(sheet, encoded(picture, ".png", {"key": key}))
        return sheet


def _alike(control: Image.Image, output: Image.Image) -> bool:
    """Of nearly the same aspect ratio: shown at the same size they can be compared."""
    return abs(control.width / control.height * output.height / output.width - 1) < 0.1
