"""What everything is done to: data, a checkpoint, a cache, runs and files, and the commands' undisturbed results."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from torture.cases import Outcome, Wrong, command, contents, forked

STEPS, EVERY = 9, 3


@dataclass
class Ground:
    """A folder with everything, made once."""

    root: Path
    cache: dict[str, bytes] = field(default_factory=dict)
    run: dict[str, bytes] = field(default_factory=dict)
    edits: dict[str, bytes] = field(default_factory=dict)
    exported: dict[str, bytes] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    """How many lines of code commands run through, by attack."""

    @property
    def jobs(self) -> Path:
        return self.root / "jobs.jsonl"

    @property
    def adapter(self) -> Path:
        return self.root / "runs" / "whole" / "adapter"

    def settings(self, folder: Path, name: str = "whole", **changes: Any) -> dict[str, Any]:
        """A config whose run is in `folder`; `changes` replace whole sections' keys."""
        settings: dict[str, Any] = {
            "family": "flux-kontext",
            "output_dir": str(folder / "runs"),
            "run_name": name,
            "model": {
                "pretrained": str(self.root / "model"), "dtype": "float32", "device": "cpu", "max_sequence_length": 64,
            },
            "data": {
                "path": str(self.root / "data"),
                "batch_size": 2,
                "held_out": {"count": 2},
                "processor": {"multi_resolutions": ["64*64", "96*96"]},
            },
            "cache": {"path": str(self.root / "cache")},
            "lora": {"rank": 2, "dropout": 0.1},
            "train": {
                "max_train_steps": STEPS, "checkpoint_every": EVERY, "gradient_checkpointing": False,
                "ema": {"decay": 0.9}, "lr_scheduler": "cosine",
            },
            "validation": {"images": 1, "num_inference_steps": 1, "noise_levels": 1},
            "predict": {"num_inference_steps": 1},
        }  # fmt: skip
        for section, values in changes.items():
            settings[section] = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
        return settings

    def config(self, folder: Path, name: str = "whole", **changes: Any) -> Path:
        """The same as a file."""
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(self.settings(folder, name, **changes)))
        return file

    def undisturbed(self, *arguments: object) -> Outcome:
        outcome = forked(command(*arguments), self.root, 9)
        if outcome.code != 0:
            raise Wrong(f"the ground does not hold: {arguments}\n{outcome.told}")
        return outcome


def prepare(root: Path) -> Ground:
    """Make the ground in an empty folder. Everything is computed in other processes, so that this one can be forked."""
    root.mkdir(parents=True, exist_ok=True)
    ground = Ground(root)
    made = forked(lambda: _make(ground), root)
    if made.code != 0:
        raise Wrong(made.told)
    config = ground.config(root)
    ground.undisturbed("cache", "--config", config)
    ground.undisturbed("fit", "--config", config)
    ground.undisturbed("predict", "--config", config, "--jobs", ground.jobs, "--lora", ground.adapter, "--output",
                       root / "edits")  # fmt: skip
    for form in ("diffusers", "comfyui"):
        ground.undisturbed("export", "--config", config, "--lora", ground.adapter, "--format", form, "--output",
                           root / f"{form}.safetensors")  # fmt: skip
        ground.exported[form] = (root / f"{form}.safetensors").read_bytes()
    ground.cache = contents(root / "cache")
    ground.run = results(root / "runs" / "whole")
    ground.edits = pictures(root / "edits")
    return ground


def results(run: Path) -> dict[str, bytes]:
    """What a run ends with, as far as it does not tell the time: parameters, averages, optimizer, adapters."""
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    found = {f"checkpoint/{file.name}": file.read_bytes() for file in sorted(last.iterdir())} if last.exists() else {}
    for name in ("adapter", "best"):
        folder = run / name
        if folder.exists():
            found |= {f"{name}/{file.name}": file.read_bytes() for file in folder.glob("*.safetensors")}
    return found


def pictures(folder: Path) -> dict[str, bytes]:
    """Pixels of what was drawn; the notes beside them tell paths."""
    return {
        path.name: Image.open(path).convert("RGB").tobytes()
        for path in sorted(folder.glob("*.png"))
        if path.name.startswith("job")
    }


def _make(ground: Ground) -> None:
    from qflux.demo.data import write_data_set
    from qflux.models import get_family
    from qflux.models.loading import save_checkpoint

    family = get_family("flux-kontext")
    save_checkpoint(family.tiny(0), ground.root / "model", family.pipeline)
    write_data_set(ground.root / "data", count=8, seed=1)
    images = sorted((ground.root / "data" / "control_images").glob("*.png"))[:4]
    lines = [
        f'{{"image": "{image}", "prompt": "job {number}", "name": "job{number}", "size": "64x64"}}\n'
        for number, image in enumerate(images)
    ]
    ground.jobs.write_text("".join(lines))
    shutil.rmtree(ground.root / "runs", ignore_errors=True)
