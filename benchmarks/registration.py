"""What do pairs that are off by pixels teach, and does `inspect --fix` cure it? On the demo's base model, on a CPU.

    python benchmarks/registration.py [--steps 240]

The edit warms up a scene's colours. In the first data set every target lies up to 3 pixels right of and below its
control, and is up to 1 % larger; the second is what `qflux inspect --fix` makes of it; the third was never moved. One
LoRA is trained on each, and all edit the same held-out scenes. How far these edits lie from their controls is measured
as `inspect` measures pairs: mean displacement in pixels, and scale.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from PIL import Image

from qflux.commands import Trainer
from qflux.config import Config
from qflux.data.images.pixels import to_image
from qflux.data.lint.fix import write_registered
from qflux.data.lint.registration import Registration, register, registered
from qflux.data.sources.folder import CONTROLS, TARGETS
from qflux.demo.instructions import SIZES
from qflux.demo.run import demo_config
from qflux.demo.scenes import draw_scene, render
from qflux.models.registry import shipped
from qflux.pictures.drawing import write_png
from qflux.runs.folder import RunFolder

WARMER = torch.tensor([1.15, 1.05, 0.7])[:, None, None]
PROMPT = "make it warmer"


def write_set(root: Path, count: int, seed: int, off: float) -> None:
    """`count` pairs; targets lie up to `3 off` pixels beside their controls, and are up to `off` per cent larger."""
    rng = random.Random(seed)
    for folder in (TARGETS, CONTROLS):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        scene, name = draw_scene(rng, *SIZES[number % len(SIZES)]), f"scene_{number:03d}"
        right, down, larger = rng.uniform(1, 3) * off, rng.uniform(1, 3) * off, rng.uniform(0, 0.01) * off
        (day,) = render([scene])
        target = to_image((day * WARMER).clamp(0, 1) * 2 - 1)
        if off:
            # What would be moved back by this lies there now.
            target = registered(target, Registration(-down, -right, 1 / (1 + larger), 1.0, (0.0, 0.0, 0.0)))
        write_png(root / CONTROLS / f"{name}.png", to_image(day * 2 - 1))
        write_png(root / TARGETS / f"{name}.png", target)
        (root / TARGETS / f"{name}.txt").write_text(PROMPT + "\n", encoding="utf-8")


def config(root: Path, name: str, steps: int) -> Config:
    return demo_config(
        root,
        [
            f"run_name={name}",
            f"data.path={root / name}",
            f"data.held_out={{sources: [{{path: {root / 'held-out'}}}]}}",
            f"model.pretrained={shipped().folder}",
            f"train.max_train_steps={steps}",
            f"train.checkpoint_every={steps}",
            "validation={images: 12, num_inference_steps: 8}",
        ],
    )


def displacement(run: RunFolder) -> tuple[float, float, int]:
    """Of the last edits against their controls: pixels, per cent of scale, and how many could be compared."""
    found = []
    for edit in run.edits:
        control, output = (Image.open(path).convert("RGB") for path in (edit.controls[0], edit.outputs[-1][1]))
        found += [moved] if (moved := register(control, output)) else []
    shifts = [(moved.right**2 + moved.down**2) ** 0.5 for moved in found]
    return fmean(shifts), fmean(100 * (moved.zoom - 1) for moved in found), len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--folder", type=Path, help="where runs go; default: a temporary folder")
    arguments = parser.parse_args()
    root = arguments.folder or Path(tempfile.mkdtemp())
    write_set(root / "moved", 120, seed=5, off=1.0)
    write_set(root / "never", 120, seed=5, off=0.0)
    write_set(root / "held-out", 12, seed=6, off=0.0)
    fixed = write_registered(Trainer(config(root, "moved", 1)).inspect().dataset.training, root / "fixed")
    print(f"{sum(each.moved for each in fixed)} of {len(fixed)} targets moved back", flush=True)
    print("| trained on | edits lie beside their controls by | scale | held-out loss | edits |")
    print("|---" * 5 + "|", flush=True)
    for name in ("moved", "fixed", "never"):
        trainer = Trainer(config(root, name, arguments.steps))
        trainer.cache()
        trainer.fit()
        run = RunFolder(trainer.config.run_dir)
        pixels, scale, count = displacement(run)
        loss = run.validation_reports[-1].held_out_loss
        print(f"| {name} | {pixels:.2f} px | {scale:+.2f} % | {loss:.4f} | {count} |", flush=True)


if __name__ == "__main__":
    main()
