"""The names under which a LoRA's tensors are filed, and the way back.

diffusers   `transformer.<layer>.lora_A.weight`, `.lora_B.weight`, `.alpha`, as diffusers' pipelines load them
comfyui     `lora_unet_<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha`, with the layer names of the original
            model and underscores for dots: what ComfyUI, kohya's sd-scripts and their kin write and read

Strength is in the alpha tensors, nowhere else: a loader that ignores metadata gets it right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from qflux.adapters.layers import FOREIGN, LoraLayer, LoraLayers
from qflux.adapters.names import Names, Parts
from qflux.errors import CheckpointError

Format = Literal["diffusers", "comfyui"]

_SUFFIXES = {  # of a tensor's name: what it is
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".lora_A.default.weight": "down",
    ".lora_B.default.weight": "up",
    ".alpha": "alpha",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".dora_scale": "magnitude",
}
_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.")


def to_format(layers: Mapping[str, LoraLayer], form: Format, names: Names) -> dict[str, Tensor]:
    """The tensors of a LoRA under the names of a format."""
    if form == "diffusers":
        return {
            f"{names.prefix}{name}{suffix}": tensor
            for name, layer in layers.items()
            for suffix, tensor in _parts(layer, ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"))
        }
    return {
        f"lora_unet_{name.replace('.', '_')}{suffix}": tensor
        for name, layer in names.to_original(layers).items()
        for suffix, tensor in _parts(layer, ("lora_down.weight", "lora_up.weight", "dora_scale"))
    }


def from_tensors(
    file: object,
    tensors: Mapping[str, Tensor],
    names: Names,
    alpha: Callable[[str, int], float] | None = None,
    together: Parts | None = None,
) -> LoraLayers:
    """A LoRA from the tensors of a file, whichever format they are named in.

    Args:
        alpha: of a layer that has no alpha tensor, from its name and rank; by default its rank.
        together: what fused layers consist of, if the file says so (see `Names.parts`).
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        suffix = next((ending for ending in _SUFFIXES if key.endswith(ending)), None)
        if suffix is None:
            raise CheckpointError(f"{file}: {key} is no LoRA weight of a transformer", FOREIGN)
        parts.setdefault(key.removesuffix(suffix), {})[_SUFFIXES[suffix]] = tensor
    flat = any(name.startswith("lora_unet_") for name in parts)
    layers: LoraLayers = {}
    for name, found in parts.items():
        for wanted in ("down", "up"):
            if wanted not in found:
                raise CheckpointError(f"{file}: {name} has no {wanted} projection", FOREIGN)
        own = names.dotted(name.removeprefix("lora_unet_")) if flat else _bare(name)
        if own is None:
            raise CheckpointError(f"{file}: the model has no layer {name}", FOREIGN)
        if own in layers:
            raise CheckpointError(f"{file}: {own} is there twice, once as {name}", FOREIGN)
        layers[own] = _layer(file, own, found, alpha or (lambda _, rank: float(rank)))
    return names.to_diffusers(file, layers, together) if flat or names.is_original(layers) else layers


def _layer(file: object, name: str, found: Mapping[str, Tensor], default: Callable[[str, int], float]) -> LoraLayer:
    down, up = found["down"], found["up"]
    if down.ndim == 2 and len(down) == 0:
        raise CheckpointError(f"{file}: {name} has rank 0", FOREIGN)
    if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
        raise CheckpointError(
            f"{file}: {name} has a down projection {tuple(down.shape)} and an up projection {tuple(up.shape)}; "
            "their ranks do not fit",
            FOREIGN,
        )
    if "alpha" in found and found["alpha"].numel() != 1:
        raise CheckpointError(f"{file}: the alpha of {name} has shape {tuple(found['alpha'].shape)}", FOREIGN)
    alpha = float(found["alpha"]) if "alpha" in found else default(name, len(down))
    if not math.isfinite(alpha):
        raise CheckpointError(f"{file}: the alpha of {name} is {alpha}", "train it again.")
    magnitude = found.get("magnitude")
    return LoraLayer(down, up, alpha, None if magnitude is None else magnitude.flatten())


def _parts(layer: LoraLayer, suffixes: tuple[str, str, str]) -> Iterable[tuple[str, Tensor]]:
    down, up, magnitude = suffixes
    yield f".{down}", layer.down
    yield f".{up}", layer.up
    yield ".alpha", torch.tensor(layer.alpha, dtype=torch.float32)
    if layer.magnitude is not None:
        # kohya's tools keep it as a column
        yield f".{magnitude}", layer.magnitude[:, None] if magnitude == "dora_scale" else layer.magnitude


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
