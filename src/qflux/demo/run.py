"""`qflux demo`: a small model learns an edit it does not know, as on a real data set: cache, fit, predict, report.

For one family the base is a trained model that ships with qflux, and the edit is night. The others have no base that
small: theirs is random, and shows the path only.
"""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qflux.adapters.attach import Weighted
from qflux.cache.build import Listener as CacheListener
from qflux.commands import Trainer
from qflux.config import Config, load_config
from qflux.data.images.decode import load_rgb, to_rgb
from qflux.data.lint.pictures import sample_tokens
from qflux.data.sample import Sample
from qflux.demo.data import write_data_set
from qflux.demo.night import SAMPLES, write_night_set
from qflux.errors import ConfigError
from qflux.files.atomic import new_folder
from qflux.models.loading import save_checkpoint
from qflux.models.registry import described, facts_of, get_family, shipped
from qflux.pictures.drawing import GridRow, batch_layout, edit_grid, loss_curves, write_png
from qflux.runs.folder import RunFolder
from qflux.runs.metrics import StepReport
from qflux.sampling.predictor import Edit, Predictor
from qflux.training.loop import FitResult

SHOWN = 4
SMALL = shipped()
SETTINGS: dict[str, Any] = {
    "family": SMALL.family,
    "output_dir": "runs/demo",
    "run_name": "night",
    "model": {
        "pretrained": "runs/demo/model",
        "dtype": "float32",
        "device": "cpu",
        "max_sequence_length": SMALL.text_tokens,
    },
    "data": {
        "path": "runs/demo/data",
        "batch_size": 4,
        "held_out": {"count": 8},
        "processor": {
            "multi_resolutions": [
                "96*96",
                "128*96",
                "128*128",
                "160*112",
                "192*96",
                "160*160",
                "128*192",
                "208*144",
                "192*192",
            ]
        },
    },
    "lora": {
        "rank": 16,
        "target_modules": list(SMALL.lora_targets),
    },
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": SMALL.learning_rate}},
    "train": {
        "max_train_steps": 320,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 30,
        "gradient_checkpointing": False,
        "checkpoint_every": 80,
    },
    "validation": {"images": 4, "num_inference_steps": 6},
    "predict": {"num_inference_steps": 8, "preprocessing": "config"},
}
"""The same as recipes/demo.yaml, for those who installed qflux without the repository."""


@dataclass(frozen=True)
class DemoSummary:
    """What the demo did, in numbers."""

    samples: int
    sizes: dict[str, int]
    tokens_per_second: float
    padding_avoided: float
    steps: int
    resumed_from: int
    """The step of the checkpoint it went on from."""
    held_out_loss: tuple[float, float]
    """Before and after."""
    error: tuple[float, float]
    """Of held-out edits before and after: mean difference from what was wanted, of 255."""
    files: dict[str, Path]
    """What was made, by what it shows."""


Progress = Callable[[str, int, int, str], None]
"""Is told how far the demo is: stage, done, total, a note."""


def demo_config(output_dir: Path, overrides: list[str] | None = None, family: str = SMALL.family) -> Config:
    """The demo's config with everything under `output_dir`."""
    settings = copy.deepcopy(SETTINGS)
    settings["family"] = family
    settings["output_dir"] = str(output_dir)
    settings["model"]["pretrained"] = str(output_dir / "model")
    settings["data"]["path"] = str(output_dir / "data")
    if family != SMALL.family:
        settings["run_name"] = "recolour"
        settings["model"]["max_sequence_length"] = None
        settings["lora"] = {"rank": 8}
        settings["train"] |= {"max_train_steps": 60, "lr_warmup_steps": 10}
        settings["optimizer"]["init_args"]["lr"] = 0.002
        settings["data"]["held_out"] = {"count": 4}
    facts = facts_of(family)
    if facts.true_cfg_scale > 1 and facts.negative_prompt is None:
        settings["predict"]["negative_prompt"] = " "
    return load_config(settings, overrides or [])


def run_demo(config: Config, progress: Progress) -> DemoSummary:
    """Everything from an empty folder to pictures. Run again, it reuses what is there."""
    _check(config)
    data, model = config.data.training_sources[0].path, Path(config.model.pretrained)
    if not data.exists():
        with new_folder(data) as folder:
            _write_data(folder, config)
    if not model.exists():
        with new_folder(model) as folder:
            _write_model(folder, config)

    trainer = Trainer(config)
    trainer.cache(CacheListener(progress=lambda done, total: progress("cache", done, total, "entries")))

    def on_step(report: StepReport) -> None:
        progress("fit", report.step, report.total_steps, f"loss {report.loss:.3f}")

    result = trainer.fit(on_step)
    dataset = trainer.samples()
    held_out = [sample for sample in dataset.held_out if sample.images]
    before, after = _predictions(trainer.predictor([Weighted(result.adapter)]), held_out, config, progress)
    wanted = [to_rgb(sample.own_images.target.load()) for sample in held_out]
    run = RunFolder(config.run_dir)
    shown = _different(held_out)
    grid = _grid([(held_out[k], before[k], after[k], wanted[k]) for k in shown])
    tokens = batch_layout([sample_tokens(held_out[k]) for k in shown])
    files = {
        "before and after": write_png(run.paths.samples / "grid.png", grid),
        "loss": write_png(run.paths.samples / "loss.png", _loss_curves(run)),
        "padded and packed": write_png(run.paths.samples / "batch.png", tokens),
        "report": run.paths.report,
        "LoRA": result.adapter,
    }
    return _summary(run, result, dataset.from_images, (_error(before, wanted), _error(after, wanted)), files)


def _summary(
    run: RunFolder, result: FitResult, samples: Sequence[Sample], error: tuple[float, float], files: dict[str, Path]
) -> DemoSummary:
    steps, losses = run.step_reports, [found.held_out_loss or 0.0 for found in run.validation_reports]
    tokens = sum(step.tokens for step in steps)
    padded = sum(step.tokens / (1 - step.padding_avoided) for step in steps)
    sizes = Counter("{}x{}".format(*sample.own_images.target.transform.size[::-1]) for sample in samples)
    return DemoSummary(
        samples=len(samples),
        sizes=dict(sorted(sizes.items())),
        tokens_per_second=tokens / sum(step.seconds for step in steps),
        padding_avoided=1 - tokens / padded,
        steps=result.steps,
        resumed_from=result.resumed_from,
        held_out_loss=(losses[0], losses[-1]),
        error=error,
        files=files,
    )


def _check(config: Config) -> None:
    """What would fail late, or write where nobody expects it."""
    output, model = config.output_dir, Path(config.model.pretrained)
    if next(folder for folder in (output, *output.absolute().parents) if folder.exists()).is_file():
        raise ConfigError(f"{output} can't be made: there is a file of that name", "give --output a folder.")
    if model != output / "model":
        raise ConfigError(
            f"the demo brings its own model to {output / 'model'}, and model.pretrained is {str(model)!r}",
            "choose the place with --output; train on other checkpoints with qflux fit.",
        )
    if config.data.held_out is None:
        raise ConfigError("the demo shows held-out samples, and data.held_out is null", "leave it out of --set.")
    known = described(str(model)).pipeline if model.is_dir() else None
    if known not in (None, facts_of(config.family).pipeline):
        raise ConfigError(f"{output} holds the demo of another family", "choose another --output.")


def _write_data(folder: Path, config: Config) -> None:
    if config.family == SMALL.family:
        write_night_set(folder, SAMPLES, config.seed)
    else:
        write_data_set(folder, 24, config.seed, edits=facts_of(config.family).controls != (0, 0))


def _write_model(folder: Path, config: Config) -> None:
    family = get_family(config.family)
    if config.family == SMALL.family:
        shutil.copytree(SMALL.folder, folder, dirs_exist_ok=True)
    else:
        save_checkpoint(family.tiny(config.seed), folder, family.pipeline)


def _predictions(
    predictor: Predictor, samples: Sequence[Sample], config: Config, progress: Progress
) -> tuple[list[Image.Image], list[Image.Image]]:
    """All edits as one ragged batch, without the LoRA and with it."""
    edits = [
        Edit(
            controls=tuple(load_rgb(image.ref) for image in sample.own_images.controls),
            prompt=sample.prompt,
            negative_prompt=config.predict.negative_prompt,
            seed=config.predict.seed,
            size=sample.own_images.target.transform.size,
        )
        for sample in samples
    ]

    def draw(first: int) -> list[Image.Image]:
        note = f"{len(edits)} images in one batch"
        images = predictor(edits, on_step=lambda n, total: progress("predict", first * total + n, 2 * total, note))
        return list(map(to_rgb, images))

    with predictor.without_adapters():
        before = draw(0)
    return before, draw(1)


def _different(samples: Sequence[Sample]) -> list[int]:
    """Some samples of different sizes, and among them one with the most controls."""
    first = max(range(len(samples)), key=lambda k: len(samples[k].shapes.controls))
    chosen: dict[Any, int] = {}
    for k in (first, *range(len(samples))):
        chosen.setdefault(samples[k].shapes.targets, k)
    return sorted(list(chosen.values())[:SHOWN], key=lambda k: samples[k].shapes.tokens)


def _grid(rows: Sequence[tuple[Sample, Image.Image, Image.Image, Image.Image]]) -> Image.Image:
    names = ("control", "control 2", "before", "after", "wanted")
    drawn = []
    for sample, before, after, wanted in rows:
        shown = sample.own_images.controls
        controls = {name: image.load() for name, image in zip(names[: len(shown)], shown, strict=True)}
        drawn.append(GridRow(sample.prompt, {**controls, "before": before, "after": after, "wanted": wanted}))
    return edit_grid(drawn, [name for name in names if any(name in row.images for row in drawn)], scale=1.25)


def _loss_curves(run: RunFolder) -> Image.Image:
    return loss_curves(
        "Loss over steps",
        {
            "training": [(step.step, step.loss) for step in run.step_reports],
            "held out, at fixed noise": [(f.step, f.held_out_loss or 0.0) for f in run.validation_reports],
        },
    )


def _error(images: Sequence[Image.Image], wanted: Sequence[Image.Image]) -> float:
    """Mean difference of pixels, of 255; every image counts the same."""
    pairs = zip(images, wanted, strict=True)
    return float(np.mean([np.abs(np.asarray(a, dtype=float) - np.asarray(b, dtype=float)).mean() for a, b in pairs]))
