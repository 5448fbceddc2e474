"""Does `loss.preserve` leave alone what should be left alone? A local edit on the demo's base model, on a CPU.

    python benchmarks/preservation.py [--steps 240] [--ways none …] [--picture docs/images/preservation.png]

One shape of a scene is to glow as it would at night; a mask says where it is. The targets are what people have: made by
something that also warmed up everything else (red and green by 6 %, blue down by 10 %). A LoRA learns that too, unless
it is held to the control, or to the base, outside of the mask. Of held-out edits after the last step: how far colours
and structure outside of the mask are from the control, and how much of the edit inside of it is done.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from PIL import Image

from qflux.commands import Trainer
from qflux.config import Config
from qflux.data.images.pixels import to_image
from qflux.data.sources.folder import CONTROLS, TARGETS
from qflux.demo.instructions import SIZES
from qflux.demo.run import demo_config
from qflux.demo.scenes import Shape, draw_scene, render, render_night
from qflux.models.registry import shipped
from qflux.pictures.drawing import GridRow, edit_grid, write_png
from qflux.runs.folder import RunFolder

WARMER = torch.tensor([1.06, 1.06, 0.9])[:, None, None]
WAYS = {
    "none": (),
    "control, weight 0.1": ("loss.preserve.weight=0.1",),
    "control, weight 0.3": ("loss.preserve.weight=0.3",),
    "base, weight 0.3": ("loss.preserve={weight: 0.3, toward: base}",),
}


def around(shape: Shape, width: int, height: int) -> torch.Tensor:
    """`(H, W)`, true on a shape and a little around it."""
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    distance = torch.hypot(x - shape.x * width, y - shape.y * height)
    return distance < 1.15 * shape.radius * min(width, height) + 2


def write_set(root: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for folder in (TARGETS, CONTROLS):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        scene = draw_scene(rng, *SIZES[number % len(SIZES)])
        shape, name = rng.choice(scene.shapes), f"scene_{number:03d}"
        region = around(shape, scene.width, scene.height)
        day, night = render([scene])[0], render_night([scene])[0]
        wanted = torch.where(region, night, (day * WARMER).clamp(0, 1))
        write_png(root / CONTROLS / f"{name}.png", to_image(day * 2 - 1))
        write_png(root / TARGETS / f"{name}.png", to_image(wanted * 2 - 1))
        write_png(root / CONTROLS / f"{name}_mask.png", Image.fromarray(region.numpy().astype("uint8") * 255))
        (root / TARGETS / f"{name}.txt").write_text(f"turn the {shape.name} into night\n", encoding="utf-8")


def config(root: Path, name: str, steps: int, overrides: tuple[str, ...]) -> Config:
    shared = [
        f"run_name={name.replace(', weight ', '-')}",
        f"data.path={root / 'data'}",
        f"model.pretrained={shipped().folder}",
        f"train.max_train_steps={steps}",
        f"train.checkpoint_every={steps}",
        "data.held_out={count: 12}",
        "validation={images: 12, num_inference_steps: 8}",
    ]
    return demo_config(root, [*shared, *overrides])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--folder", type=Path, help="where runs go; default: a temporary folder")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    root = arguments.folder or Path(tempfile.mkdtemp())
    write_set(root / "data", 132, seed=5)
    print("| preserve | colours outside (CIEDE2000) | SSIM outside | cast | edit done | held-out loss |")
    print("|---" * 6 + "|", flush=True)
    runs: dict[str, RunFolder] = {}
    for name in arguments.ways:
        trainer = Trainer(config(root, name, arguments.steps, WAYS[name]))
        trainer.cache()
        trainer.fit()
        runs[name] = RunFolder(trainer.config.run_dir)
        last = runs[name].validation_reports[-1]
        cells = (f"{last.outside_colour:.2f}", f"{last.outside_ssim:.3f}", f"{last.cast:.2f}", f"{last.done:.1%}")
        print(f"| {name} |", " | ".join(cells), f"| {last.held_out_loss:.4f} |", flush=True)
    if arguments.picture:
        write_png(arguments.picture, sheet(runs))


def sheet(runs: dict[str, RunFolder], count: int = 4) -> Image.Image:
    """The same held-out edits of all runs."""
    rows = []
    for number, history in enumerate(next(iter(runs.values())).edits[:count]):
        assert history.wanted is not None
        images: dict[str, Image.Image] = {
            "control": Image.open(history.controls[0]),
            "target": Image.open(history.wanted),
        }
        for name, run in runs.items():
            images[name] = Image.open(run.edits[number].outputs[-1][1])
        rows.append(GridRow(history.prompt, images))
    return edit_grid(rows, ["control", "target", *runs], scale=1.2)


if __name__ == "__main__":
    main()
