"""`qflux demo`: make data and a tiny model, then cache, fit and predict, as on a real data set."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from qflux.adapters.attach import Weighted
from qflux.config import Config, load_config
from qflux.data.geometry import Transform
from qflux.data.images import load_rgb
from qflux.demo.data import write_data_set
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.report.inspection import sample_tokens
from qflux.report.pictures import GridRow, batch_layout, edit_grid, write_png
from qflux.sampling.predict import Edit
from qflux.training.encode import PlannedSample
from qflux.training.fill import Listener as CacheListener
from qflux.training.metrics import StepReport
from qflux.training.trainer import Trainer

SAMPLES = 24
SHOWN = (4, 1, 2, 7)
SETTINGS: dict[str, Any] = {
    "family": "flux-kontext",
    "output_dir": "runs/demo",
    "run_name": "recolour",
    "model": {"pretrained": "runs/demo/model", "dtype": "float32", "device": "cpu", "max_sequence_length": 64},
    "data": {
        "path": "runs/demo/data",
        "batch_size": 4,
        "processor": {"multi_resolutions": ["128*128", "192*192", "256*256"]},
    },
    "lora": {"rank": 8},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003}},
    "train": {"max_train_steps": 120, "gradient_checkpointing": False, "checkpoint_every": 40},
    "loss": {"use_mask_loss": True},
    "predict": {"num_inference_steps": 8},
}
"""The same as recipes/demo.yaml, for those who installed qflux without the repository."""


@dataclass(frozen=True)
class DemoSummary:
    """What the demo did, in numbers."""

    samples: int
    sizes: dict[str, int]
    tokens: int
    padding_avoided: float
    steps: int
    first_loss: float
    last_loss: float
    """Means over the first and the last tenth of the steps: single steps are as noisy as their timesteps."""
    files: list[Path]


@dataclass(frozen=True)
class DemoProgress:
    """Where the demo says how far it is: stage, done, total, a note."""

    update: Callable[[str, int, int, str], None]


def demo_config(output_dir: Path, overrides: list[str] | None = None, family: str = "flux-kontext") -> Config:
    """The demo's config with everything under `output_dir`."""
    settings = copy.deepcopy(SETTINGS)
    settings["family"] = family
    settings["output_dir"] = str(output_dir)
    settings["model"]["pretrained"] = str(output_dir / "model")
    settings["data"]["path"] = str(output_dir / "data")
    if get_family(family).defaults.true_cfg_scale > 1:
        settings["predict"]["negative_prompt"] = " "
    if get_family(family).controls == (0, 0):
        settings["loss"]["use_mask_loss"] = False
    if family != SETTINGS["family"]:
        settings["model"]["max_sequence_length"] = None
    return load_config(settings, overrides or [])


def run_demo(config: Config, progress: DemoProgress) -> DemoSummary:
    """Everything from an empty folder to pictures. Run again, it reuses what is there."""
    data, model = config.data.training_sources[0].path, Path(config.model.pretrained)
    family = get_family(config.family)
    _make_once(data, lambda folder: write_data_set(folder, SAMPLES, config.seed, family.controls != (0, 0)))
    _make_once(model, lambda folder: save_checkpoint(family.tiny(config.seed), folder, family.pipeline))

    trainer = Trainer(config)
    trainer.cache(CacheListener(progress=lambda done, total: progress.update("cache", done, total, "entries")))

    def on_step(report: StepReport) -> None:
        progress.update("fit", report.step, report.total_steps, f"loss {report.loss:.3f}")

    result = trainer.fit(on_step)
    samples = sorted(trainer.samples().from_images, key=lambda sample: sample.example.name)
    pictures = config.run_dir / "samples"
    grid = write_png(pictures / "grid.png", _predictions(trainer, samples, result.adapter, progress))
    layout = write_png(pictures / "batch.png", _batch_picture(samples, trainer))
    reports = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    tenth = max(1, len(reports) // 10)
    sizes = Counter("{}x{}".format(*sample.transforms[0].size[::-1]) for sample in samples)
    tokens = sum(report["tokens"] for report in reports)
    padded = sum(report["tokens"] / (1 - report["padding_avoided"]) for report in reports)
    return DemoSummary(
        samples=len(samples),
        sizes=dict(sorted(sizes.items())),
        tokens=tokens,
        padding_avoided=1 - tokens / padded,
        steps=result.steps,
        first_loss=sum(report["loss"] for report in reports[:tenth]) / tenth,
        last_loss=sum(report["loss"] for report in reports[-tenth:]) / tenth,
        files=[result.adapter, config.run_dir / "metrics.jsonl", grid, layout],
    )


def _make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder that does not exist yet; it appears whole. An existing one is used as it is."""
    if folder.exists():
        return
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    make(staging)
    staging.rename(folder)


def _predictions(trainer: Trainer, samples: list[PlannedSample], adapter: Path, progress: DemoProgress) -> Image.Image:
    """One ragged batch of edits of different sizes, beside what was given and what was wanted."""
    settings = trainer.config.predict
    shown = [samples[index] for index in SHOWN]
    edits = [
        Edit(
            controls=tuple(load_rgb(path) for path in sample.example.controls),
            prompt=sample.example.prompt,
            negative_prompt=settings.negative_prompt,
            seed=settings.seed,
            size=sample.transforms[0].size,
        )
        for sample in shown
    ]
    note = f"{len(edits)} images in one batch"
    predicted = trainer.predictor([Weighted(adapter)])(
        edits, on_step=lambda done, total: progress.update("predict", done, total, note)
    )
    rows = []
    for sample, result in zip(shown, predicted, strict=True):
        names = ["control", "control 2"][: len(sample.example.controls)]
        images = {
            name: transform(load_rgb(path))
            for name, path, transform in zip(names, sample.example.controls, sample.transforms[1:], strict=True)
        }
        target: Transform = sample.transforms[0]
        rows.append(
            GridRow(
                sample.example.prompt,
                {**images, "target": target(load_rgb(sample.example.target)), "prediction": result},
            )
        )
    used = {column for row in rows for column in row.images}
    return edit_grid(rows, [c for c in ("control", "control 2", "target", "prediction") if c in used])


def _batch_picture(samples: list[PlannedSample], trainer: Trainer) -> Image.Image:
    shown = [samples[index] for index in SHOWN]

    def text_tokens(sample: PlannedSample) -> int:
        return len(trainer.store.load(sample.keys).text.tokens)

    return batch_layout([sample_tokens(sample, text_tokens(sample)) for sample in shown])
