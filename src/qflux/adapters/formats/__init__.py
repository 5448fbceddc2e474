"""The file formats of a LoRA: one object in one file each. ADD A FORMAT HERE: a file, and a place in `FORMATS`.

Strength is in the alpha tensors, nowhere else: a loader that ignores metadata gets it right. The one exception is a
DoRA for families whose pipeline reads alphas by a converter that knows no magnitudes (see `diffusers`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping

from torch import Tensor

from qflux.adapters.formats.comfyui import COMFYUI
from qflux.adapters.formats.diffusers import DIFFUSERS
from qflux.adapters.formats.format import Format, layer_from, part_of
from qflux.adapters.formats.peft import PEFT, is_product
from qflux.adapters.layers import FOREIGN, LoraLayers
from qflux.adapters.names import Names, Parts
from qflux.errors import CheckpointError, ConfigError

__all__ = ["FORMATS", "Format", "format_of", "from_tensors"]

logger = logging.getLogger(__name__)

FORMATS: tuple[Format, ...] = (COMFYUI, PEFT, DIFFUSERS)
"""In the order in which files are recognised; the last one takes what no other does."""

_TEXT_ENCODER = re.compile(r"^(lora_te\d?_|text_encoder(_\d)?\.|text_encoders\.)")


def format_of(name: str) -> Format:
    """The format of that name."""
    found = next((known for known in FORMATS if known.name == name), None)
    if found is None:
        raise ConfigError(f"there is no LoRA format {name!r}", f"known: {', '.join(known.name for known in FORMATS)}.")
    return found


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
    of_text = [key for key in tensors if _TEXT_ENCODER.match(key)]
    if of_text:
        logger.warning("%s: %d tensors of text encoders are left out; the transformer's are used", file, len(of_text))
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        if _TEXT_ENCODER.match(key):
            continue
        if is_product(key):
            raise CheckpointError(f"{file}: {key} is of a LoKr or LoHa of another program", "give a LoRA, or PEFT's.")
        found = part_of(key)
        if found is None:
            raise CheckpointError(f"{file}: {key} is no LoRA weight of a transformer", FOREIGN)
        parts.setdefault(found[0], {})[found[1]] = tensor
    form = next(known for known in FORMATS if known.recognises(parts))
    layers: LoraLayers = {}
    for name, found_parts in parts.items():
        for wanted in ("down", "up"):
            if wanted not in found_parts:
                raise CheckpointError(f"{file}: {name} has no {wanted} projection", FOREIGN)
        own = form.layer_name(name, names)
        if own is None:
            raise CheckpointError(f"{file}: the model has no layer {name}", FOREIGN)
        if own in layers:
            raise CheckpointError(f"{file}: {own} is there twice, once as {name}", FOREIGN)
        layers[own] = layer_from(file, own, found_parts, alpha or (lambda _, rank: float(rank)))
    if form.has_original_names or names.is_original(layers):
        return names.to_diffusers(file, layers, together)
    return layers
