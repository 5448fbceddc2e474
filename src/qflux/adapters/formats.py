"""The names under which a LoRA's tensors are filed, and the way back.

diffusers   `transformer.<layer>.lora_A.weight`, `.lora_B.weight`, `.alpha`, as diffusers' pipelines load them
comfyui     `lora_unet_<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha`, with the layer names of the original
            model and underscores for dots: what ComfyUI, kohya's sd-scripts and their kin write and read

Strength is in the alpha tensors, nowhere else: a loader that ignores metadata gets it right. The one exception is DoRA
for families whose pipeline reads alphas by a converter that knows no magnitudes (`Names.prefix` is empty): that is
filed as PEFT does it, with the strength in the metadata.

Read, besides these: OneTrainer (`lora_transformer_<layer>`), SimpleTuner's LyCORIS (`lycoris_<layer>`), PEFT's own
files, and files with layers of a text encoder, which are left out.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from qflux.adapters.layers import FOREIGN, LoraLayer, LoraLayers
from qflux.adapters.names import Names, Parts
from qflux.errors import CheckpointError

logger = logging.getLogger(__name__)

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
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
"""Before names with underscores for dots: kohya's, OneTrainer's, SimpleTuner's."""
_TEXT_ENCODER = re.compile(r"^(lora_te\d?_|text_encoder(_\d)?\.|text_encoders\.)")
_PRODUCT = re.compile(r"\.(lokr_|hada_)")


def is_dora(layers: Mapping[str, LoraLayer]) -> bool:
    return any(layer.magnitude is not None for layer in layers.values())


def without_alphas(layers: Mapping[str, LoraLayer], form: Format, names: Names) -> bool:
    """The strength of this LoRA is in the metadata, since the format's reader takes no alpha tensors of it."""
    return form == "diffusers" and not names.prefix and is_dora(layers)


def to_format(layers: Mapping[str, LoraLayer], form: Format, names: Names) -> dict[str, Tensor]:
    """The tensors of a LoRA under the names of a format."""
    if without_alphas(layers, form, names):
        return {
            f"transformer.{name}{suffix}": tensor
            for name, layer in layers.items()
            for suffix, tensor in _parts(layer, ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"))
            if suffix != ".alpha"
        }
    if form == "diffusers":
        return {
            f"{names.prefix}{name}{suffix}": tensor
            for name, layer in layers.items()
            for suffix, tensor in _parts(layer, ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"))
        }
    if is_dora(layers):
        raise CheckpointError(
            "a DoRA can't be exported for ComfyUI, which divides by the norm of the base weight where DoRA divides by "
            "that of the sum",
            "export it as merged, or use it with diffusers or `qflux predict`.",
        )
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
    of_text = [key for key in tensors if _TEXT_ENCODER.match(key)]
    if of_text:
        logger.warning("%s: %d tensors of text encoders are left out; the transformer's are used", file, len(of_text))
    for key, tensor in sorted(tensors.items()):
        if _TEXT_ENCODER.match(key):
            continue
        if _PRODUCT.search(key):
            raise CheckpointError(f"{file}: {key} is of a LoKr or LoHa of another program", "give a LoRA, or PEFT's.")
        suffix = next((ending for ending in _SUFFIXES if key.endswith(ending)), None)
        if suffix is None:
            raise CheckpointError(f"{file}: {key} is no LoRA weight of a transformer", FOREIGN)
        parts.setdefault(key.removesuffix(suffix), {})[_SUFFIXES[suffix]] = tensor
    flat = any(name.startswith(_FLAT_PREFIXES) for name in parts)
    layers: LoraLayers = {}
    for name, found in parts.items():
        for wanted in ("down", "up"):
            if wanted not in found:
                raise CheckpointError(f"{file}: {name} has no {wanted} projection", FOREIGN)
        own = names.dotted(_bare(name, _FLAT_PREFIXES)) if flat else _bare(name, _PREFIXES)
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
    if magnitude is not None and magnitude.shape not in ((len(up),), (len(up), 1)):
        raise CheckpointError(
            f"{file}: {name} has DoRA magnitudes of shape {tuple(magnitude.shape)}; one per output, {(len(up), 1)}, "
            "can be used",
            "export it again with magnitudes per output, or merge it where it was trained.",
        )
    return LoraLayer(down, up, alpha, None if magnitude is None else magnitude.flatten())


def _parts(layer: LoraLayer, suffixes: tuple[str, str, str]) -> Iterable[tuple[str, Tensor]]:
    down, up, magnitude = suffixes
    yield f".{down}", layer.down
    yield f".{up}", layer.up
    yield ".alpha", torch.tensor(layer.alpha, dtype=torch.float32)
    if layer.magnitude is not None:
        # kohya's tools keep it as a column
        yield f".{magnitude}", layer.magnitude[:, None] if magnitude == "dora_scale" else layer.magnitude


def _bare(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name
