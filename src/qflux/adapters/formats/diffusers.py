"""diffusers' format: `transformer.<layer>.lora_A.weight`, `.lora_B.weight`, `.alpha`, as its pipelines load them.

Read as well: the same without a prefix, and with ComfyUI's `diffusion_model.` before the names of either library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from qflux.adapters.formats.format import Format, is_dora, tensors_of, without_prefixes
from qflux.adapters.layers import LoraLayer
from qflux.adapters.names import Names

PREFIX = "transformer."
_SUFFIXES = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


class DiffusersFormat(Format):
    """What qflux writes, and what diffusers' `load_lora_weights` takes."""

    name = "diffusers"

    def recognises(self, layers: Collection[str]) -> bool:
        return True

    def layer_name(self, name: str, names: Names) -> str | None:
        return without_prefixes(name, (PREFIX, "diffusion_model."))

    def write(self, layers: Mapping[str, LoraLayer], names: Names) -> dict[str, Tensor]:
        bare = self.strength_in_metadata(layers, names)
        prefix = PREFIX if bare else names.prefix
        return {
            f"{prefix}{name}{suffix}": tensor
            for name, layer in layers.items()
            for suffix, tensor in tensors_of(layer, _SUFFIXES)
            if suffix != ".alpha" or (names.takes_alphas and not bare)
        }

    def filed(self, layers: Mapping[str, LoraLayer], names: Names) -> Mapping[str, LoraLayer]:
        # Without alphas every reader takes a LoRA at strength 1: what it has beside that goes into the up projection.
        return layers if names.takes_alphas else {name: layer.at_strength_1() for name, layer in layers.items()}

    def strength_in_metadata(self, layers: Mapping[str, LoraLayer], names: Names) -> bool:
        # Without a prefix the pipeline reads alphas by a converter that knows no magnitudes: filed as PEFT does it.
        return not names.prefix and is_dora(layers)


DIFFUSERS = DiffusersFormat()
