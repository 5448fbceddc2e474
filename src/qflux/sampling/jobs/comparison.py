"""`qflux predict --compare`: what the edits of a list did besides the edit, with the LoRA and without it.

Every result is measured against the image it was made from, and against the wanted one where the list has it
(`measures.edit`). The same edits of the base, without adapters, are in the folder `before/`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qflux.adapters.attach import Weighted
from qflux.config import Config
from qflux.config.sampling import PredictSettings
from qflux.data.images.decode import ImageFile, load_mask, load_rgb, to_rgb
from qflux.data.lint.alignment import Drift, drift_between
from qflux.files.atomic import write_bytes
from qflux.measures.edit import EditMeasures, means, measure, perceptual_means
from qflux.sampling.jobs.lists import Job
from qflux.sampling.jobs.run import JobsReport, Progress, opened, predict_many
from qflux.sampling.likeness import Likeness
from qflux.sampling.predictor import Predictor
from qflux.sampling.prepare import Edit

BEFORE, FILE = "before", "measures.jsonl"
"""Where the base's edits go, and what was measured."""


@dataclass(frozen=True)
class Measured:
    """One edit."""

    measures: EditMeasures
    drift: Drift | None = None

    def line(self) -> dict[str, Any]:
        return self.measures.line() | ({"drift": self.drift.line()} if self.drift else {})


@dataclass(frozen=True)
class Compared:
    """The results of one job."""

    name: str
    after: Measured
    before: Measured | None = None
    """Of the base; none where no adapter is used."""

    @property
    def change(self) -> float:
        """By how much it changed what it should have left alone; what is not known sorts last."""
        found = self.after.measures.outside_colour
        return -1.0 if found is None else found


@dataclass
class Comparison:
    """What was found, the worst edit first."""

    edits: list[Compared] = field(default_factory=list)
    file: Path | None = None

    def means(self) -> dict[str, tuple[float | None, float | None]]:
        """Of each measure: before, after."""
        after = _all_means([edit.after.measures for edit in self.edits])
        base = _all_means([edit.before.measures for edit in self.edits if edit.before])
        return {name: (base.get(name), value) for name, value in after.items() if value is not None}


def _all_means(measured: list[EditMeasures]) -> dict[str, float | None]:
    return means(measured) | perceptual_means(measured)


def predict_and_compare(
    config: Config,
    predictor: Predictor,
    adapters: Sequence[Weighted],
    jobs: Sequence[Job],
    output: Path,
    negative_prompt: str | None,
    progress: Progress,
) -> tuple[JobsReport, Comparison]:
    """Make every image of a list, with the adapters and without, and measure them all."""
    likeness = Likeness(config.validation.perceptual)  # what can't be loaded is said first
    report = predict_many(config, predictor, adapters, jobs, output, negative_prompt, progress)
    if adapters:
        with predictor.without_adapters():
            predict_many(
                config,
                predictor,
                (),
                jobs,
                output / BEFORE,
                negative_prompt,
                lambda done, total, note: progress(done, total, f"{note}, without the LoRA"),
            )
    return report, _compared(predictor, jobs, output, config.predict, likeness)


def _compared(
    predictor: Predictor, jobs: Sequence[Job], folder: Path, settings: PredictSettings, likeness: Likeness
) -> Comparison:
    """Measure the results of a list that lie in a folder, and those of the base where there are any."""
    found = []
    for job in jobs:
        after, base = folder / f"{job.name}.png", folder / BEFORE / f"{job.name}.png"
        if not after.exists():  # the report says why
            continue
        references = _References.of(predictor, job, opened(job, settings))
        before = _measured(base, references, likeness) if base.exists() else None
        found.append(Compared(job.name, _measured(after, references, likeness), before))
    found.sort(key=lambda edit: -edit.change)
    lines = [
        {"name": edit.name, "after": edit.after.line()} | ({"before": edit.before.line()} if edit.before else {})
        for edit in found
    ]
    write_bytes(folder / FILE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
    return Comparison(found, folder / FILE)


@dataclass(frozen=True)
class _References:
    """What a result is compared with: images at its size, as the VAE returns them."""

    control: Image.Image | None
    wanted: Image.Image | None
    original: Image.Image | None
    """The wanted image before the VAE."""
    mask: NDArray[np.float32] | None

    @classmethod
    def of(cls, predictor: Predictor, job: Job, edit: Edit) -> _References:
        control = predictor.prepare.returned(edit, edit.controls[0])[1] if edit.controls else None
        original, wanted = None, None
        if job.wanted is not None:
            original, wanted = predictor.prepare.returned(edit, load_rgb(ImageFile(job.wanted)))
        mask = None
        if job.mask is not None:
            drawn = predictor.prepare.returned(edit, load_mask(ImageFile(job.mask)).convert("RGB"))[0]
            mask = np.asarray(drawn.convert("L"), dtype=np.float32) / np.float32(255)
        return cls(control, wanted, original, mask)


def _measured(path: Path, references: _References, likeness: Likeness) -> Measured:
    with Image.open(path) as image:
        output = to_rgb(image)
    found = measure(output, references.control, references.wanted, references.mask, references.original)
    found = likeness.added(found, output, references.control, references.wanted)
    control = references.control if references.control and references.control.size == output.size else None
    return Measured(found, drift_between(control, output, references.mask) if control else None)
