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


def preset(model: Model, machine: Machine, samples: int, side: float) -> Preset:
    """What a machine allows for a model, and for pictures as large as a square of this side."""
    if model.is_small:
        return Preset("bfloat16" if machine.gpu else "float32", None, min(4, samples), 192, False, False, 320)
    largest = min(LARGEST, round(side))
    if not machine.gpu:
        is_large = model.gigabytes > 1
        told = f"there is no GPU here: a model of {model.gigabytes:.0f} GB takes minutes for a step on a CPU"
        notes = (f"{told}; this config is written for it all the same",) if is_large else ()
        batch = 1 if is_large else min(4, samples)
        return Preset("float32", None, batch, LARGEST, is_large, False, _steps(samples, batch), notes)
    for quantization, package in ((None, None), ("int8", "torchao"), ("nf4", "bitsandbytes")):
        for batch in (4, 2):
            if _needed(model, quantization, batch, largest) <= _room(machine):
                needs = _needs(package) if package else ()
                size, compiled = min(batch, samples), quantization != "nf4"
                return Preset("bfloat16", quantization, size, LARGEST, True, compiled, _steps(samples, size), needs)
    # One at a time, and smaller where that is too much as well.
    fitting = [s for s in (LARGEST, 768, 512) if _needed(model, "nf4", 1, min(s, largest)) <= _room(machine)]
    told = f"{machine} is little for a model of {model.gigabytes:.0f} GB: steps may run out of memory"
    needs = (*_needs("bitsandbytes"), *(() if fitting else (told,)))
    return Preset("bfloat16", "nf4", 1, fitting[0] if fitting else 512, True, False, _steps(samples, 1), needs)


LARGEST = 1024
_BYTES = {None: 1.0, "int8": 0.52, "nf4": 0.3}
"""Of the weights, what is left of bfloat16: with the scales, and the layers that are not quantized."""
_PER_EDIT = 4.3
"""GiB that an edit of 1024 x 1024 pixels with one control takes while it trains (benchmarks/memory.py: 4.0 and 4.3)."""


def _needed(model: Model, quantization: str | None, batch: int, side: int) -> float:
    """GiB of a step that recomputes activations."""
    weights = model.gigabytes * 1e9 / 2**30
    return weights * _BYTES[quantization] + 1 + _PER_EDIT * batch * (side / LARGEST) ** 2


def _room(machine: Machine) -> float:
    """GiB that a run may plan with: the context of the device and gaps between blocks take the rest."""
    return 0.93 * machine.memory_gib - 1


def _steps(samples: int, batch: int) -> int:
    """About a hundred visits of each sample."""
    return min(4000, max(500, 100 * -(-samples // batch)))


def _needs(package: str) -> tuple[str, ...]:
    return () if is_installed(package) else (f"the weights are quantized, which needs pip install 'qflux[{package}]'",)
