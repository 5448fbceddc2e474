"""Does a model learn faster from several noises of a sample, in the same time? A small Qwen-Image-2.1, on the CPU.

    python benchmarks/noises_learning.py [--seconds 40] [--seeds 3]

A model of the demo's size (random weights, all of which train) learns the demo's synthetic edits. Each row trains for
the same time: its seconds a step are measured first, and the steps that fit are what it gets. Rows differ in samples a
step and in noises a sample; held-out loss is over the same samples, noises and noise levels for all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.images.decode import ImageFile, load_rgba
from qflux.data.images.pixels import to_pixels
from qflux.demo.data import write_data_set
from qflux.models import QwenImage21Transformer2DModel, get_family
from qflux.models.loading import save_checkpoint

FAMILY = "qwen-image-2.1"
ROWS = ((4, 1), (2, 2), (1, 4), (4, 2), (4, 4))
"""Samples a step, and noises of each."""


def settings(folder: Path, name: str, samples: int, noises: int, steps: int, seed: int) -> dict[str, Any]:
    return {
        "family": FAMILY,
        "seed": seed,
        "output_dir": str(folder / "runs"),
        "run_name": name,
        "model": {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {
            "path": str(folder / "data"),
            "batch_size": samples,
            "held_out": {"count": 16},
            "processor": {"multi_resolutions": ["96*96", "128*128", "160*160"]},
        },
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        "train": {
            "method": "full",
            "max_train_steps": steps,
            "checkpoint_every": steps,
            "noises_per_sample": noises,
            "lr_scheduler": "cosine",
            "gradient_checkpointing": False,
            "preflight": False,
        },
        "validation": {"images": 0, "noise_levels": 4},
    }


def run(values: dict[str, Any]) -> tuple[list[float], float, float]:
    """Seconds of each step, and the held-out loss before and after."""
    trainer = Trainer(load_config(values))
    trainer.cache()
    result = trainer.fit()
    folder = Path(values["output_dir"]) / values["run_name"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = json.loads((folder / "validation.jsonl").read_text().splitlines()[0])["held_out_loss"]
    assert result.held_out_loss is not None
    return [line["seconds"] for line in lines], first, result.held_out_loss


def _normalise(parts: Any, files: list[Path]) -> None:
    """Latents of a random VAE with mean 0 and variance 1, as those of a trained one are."""
    vae, found = parts.vae, []
    for file in files:
        pixels = to_pixels(load_rgba(ImageFile(file)).resize((128, 128)))
        with torch.no_grad():
            found.append(vae.encode(pixels[None, :, None]).latent_dist.mode()[0, :, 0].flatten(1))
    latents = torch.cat(found, dim=1)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("| samples a step | noises of each | s/step | steps | seconds | held-out loss, by seed | mean |")
    print("|---" * 7 + "|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = get_family(FAMILY).tiny(0)
        parts.transformer = QwenImage21Transformer2DModel(
            num_layers=6, attention_head_dim=32, num_attention_heads=6, context_in_dim=32, axes_dims_rope=(8, 12, 12)
        )
        write_data_set(folder / "data", 80, 0)
        _normalise(parts, sorted((folder / "data" / "training_images").glob("*.png"))[:20])
        save_checkpoint(parts, folder / "model", get_family(FAMILY).pipeline)
        for samples, noises in ROWS:
            trial, *_ = run(settings(folder, f"trial-{samples}-{noises}", samples, noises, 52, 0))
            pace = statistics.mean(trial[4:])  # of samples of all sizes
            steps = max(1, round(arguments.seconds / pace))
            found, spent = [], []
            for seed in range(arguments.seeds):
                times, _, loss = run(settings(folder, f"run-{samples}-{noises}-{seed}", samples, noises, steps, seed))
                found.append(loss)
                spent.append(sum(times))
            losses = ", ".join(f"{loss:.4f}" for loss in found)
            print(
                f"| {samples} | {noises} | {pace:.3f} | {steps} | {statistics.mean(spent):.0f} | {losses} "
                f"| {statistics.mean(found):.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
