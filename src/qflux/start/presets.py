"""What a model should be trained with: facts of the published checkpoints, of a folder, and what a machine allows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from qflux.errors import ConfigError
from qflux.models.shipped import SMALL, local_folder
from qflux.start.machine import Machine, is_installed


@dataclass(frozen=True)
class Published:
    """A family's own checkpoint."""

    hub_id: str
    pipeline: str
    gigabytes: float
    """Of the transformer, in bfloat16."""
    controls: tuple[int, int | None]
    """The least and the most a sample may have."""
    inference_steps: int
    has_cfg: bool
    """A negative prompt is usual."""


FAMILIES = {
    "flux-kontext": Published(
        "black-forest-labs/FLUX.1-Kontext-dev", "FluxKontextPipeline", 23.8, (0, None), 28, has_cfg=False
    ),
    "qwen-image": Published("Qwen/Qwen-Image", "QwenImagePipeline", 40.9, (0, 0), 50, has_cfg=True),
    "qwen-image-edit": Published("Qwen/Qwen-Image-Edit", "QwenImageEditPipeline", 40.9, (1, 4095), 50, has_cfg=True),
    "qwen-image-edit-plus": Published(
        "Qwen/Qwen-Image-Edit-2509", "QwenImageEditPlusPipeline", 40.9, (0, 4095), 50, has_cfg=True
    ),
}


@dataclass(frozen=True)
class Model:
    """What will be trained."""

    family: str
    pretrained: str
    gigabytes: float
    why: str = ""
    """Why it was taken, if nobody asked for it."""

    @property
    def is_small(self) -> bool:
        return self.pretrained == SMALL

    @property
    def published(self) -> Published:
        return FAMILIES[self.family]


def choose_model(pretrained: str | None, family: str | None, machine: Machine, has_controls: bool) -> Model:
    """The model that somebody names; otherwise the family's own, or the small one where that could not run."""
    if family is not None and family not in FAMILIES:
        raise ConfigError(f"--family {family} is not known", f"use one of {', '.join(FAMILIES)}.")
    if pretrained in (SMALL, "small"):
        if family not in (None, "flux-kontext"):
            raise ConfigError(f"{SMALL} is of the family flux-kontext, and --family is {family}", "leave it out.")
        return Model("flux-kontext", SMALL, 0.02)
    if pretrained is not None:
        found = _family_of(pretrained)
        if family and found and family != found:
            raise ConfigError(
                f"--model {pretrained} is of the family {found}, and --family is {family}", "leave it out."
            )
        name = family or found or "flux-kontext"
        return Model(name, pretrained, _gigabytes(local_folder(pretrained)) or FAMILIES[name].gigabytes)
    name = family or ("flux-kontext" if has_controls else "qwen-image")
    own = FAMILIES[name]
    if family is not None or machine.gpu or _is_here(own.hub_id):
        return Model(name, own.hub_id, own.gigabytes)
    why = (
        f"there is no GPU here, and no checkpoint of {own.hub_id}: the small model that ships with qflux is trained, "
        f"which shows within minutes what your data can teach; for the real one, --model {own.hub_id} on a GPU"
    )
    return Model("flux-kontext", SMALL, 0.02, why)


def _family_of(pretrained: str) -> str | None:
    """From the description in a folder, or from the name of a published checkpoint."""
    try:
        described = json.loads((local_folder(pretrained) / "model_index.json").read_text()).get("_class_name")
    except (OSError, ValueError, AttributeError):
        described = None
    for name, known in FAMILIES.items():
        if described == known.pipeline or pretrained.lower() == known.hub_id.lower():
            return name
    lowered = pretrained.lower()
    if "qwen-image-edit" in lowered:
        return "qwen-image-edit" if lowered.endswith("qwen-image-edit") else "qwen-image-edit-plus"
    return "qwen-image" if "qwen-image" in lowered else "flux-kontext" if "kontext" in lowered else None


def _gigabytes(folder: Path) -> float | None:
    files = list((folder / "transformer").glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / 1e9 if files else None


def _is_here(hub_id: str) -> bool:
    """Whether the hub's cache on this machine holds the checkpoint's transformer."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415

    snapshots = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    return any(snapshots.glob("*/transformer/*.safetensors"))


@dataclass(frozen=True)
class Preset:
    """Settings that depend on the model and the machine."""

    dtype: str
    quantization: str | None
    batch_size: int
    largest_side: int
    """Of the square whose area no image should exceed."""
    gradient_checkpointing: bool
    compile: bool
    steps: int
    notes: tuple[str, ...] = ()


def preset(model: Model, machine: Machine, samples: int) -> Preset:
    """What a machine allows for a model."""
    if model.is_small:
        return Preset("bfloat16" if machine.gpu else "float32", None, min(4, samples), 192, False, False, 320)
    batch = min(4, samples)
    steps = min(4000, max(500, 100 * -(-samples // batch)))
    if not machine.gpu:
        notes = []
        if model.gigabytes > 1:
            notes.append(
                f"there is no GPU here: a model of {model.gigabytes:.0f} GB takes minutes for a step on a CPU; this "
                "config is written for it all the same"
            )
        is_large = model.gigabytes > 1
        return Preset("float32", None, 1 if is_large else batch, 1024, is_large, False, steps, tuple(notes))
    room, weights = machine.memory_gib - 2, model.gigabytes * 1e9 / 2**30
    if room >= weights + 8:
        return Preset("bfloat16", None, batch, 1024, True, True, steps)
    if room >= 0.5 * weights + 12:
        return Preset("bfloat16", "int8", batch, 1024, True, True, steps, _needs("torchao"))
    notes_4 = list(_needs("bitsandbytes"))
    if room < 0.3 * weights + 4:
        notes_4.append(
            f"{machine} is little for a model of {model.gigabytes:.0f} GB: the first steps may run out of memory"
        )
    side = 1024 if machine.memory_gib >= 40 else 768 if machine.memory_gib >= 20 else 512
    return Preset("bfloat16", "nf4", min(2, samples), side, True, False, steps, tuple(notes_4))


def _needs(package: str) -> tuple[str, ...]:
    return () if is_installed(package) else (f"the weights are quantized, which needs pip install 'qflux[{package}]'",)
