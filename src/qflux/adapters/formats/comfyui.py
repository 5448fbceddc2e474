"""ComfyUI's and kohya's format: `lora_unet_<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha`.

Layers have the names of the original model, with underscores for dots. Read as well: OneTrainer's
(`lora_transformer_<layer>`) and SimpleTuner's LyCORIS (`lycoris_<layer>`), whose names are diffusers'.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from qflux.adapters.formats.format import Format, is_dora, tensors_of, without_prefixes
from qflux.adapters.layers import LoraLayer
from qflux.adapters.names import Names, Parts
from qflux.errors import CheckpointError

PREFIX = "lora_unet_"
_PREFIXES = (PREFIX, "lora_transformer_", "lycoris_")
_SUFFIXES = ("lora_down.weight", "lora_up.weight", "dora_scale")


class ComfyuiFormat(Format):
    """What ComfyUI, kohya's sd-scripts and their kin write and read."""

    name = "comfyui"
    has_original_names = True

    def recognises(self, layers: Collection[str]) -> bool:
        return any(name.startswith(_PREFIXES) for name in layers)

    def layer_name(self, name: str, names: Names) -> str | None:
        return names.dotted(without_prefixes(name, _PREFIXES))

    def write(self, layers: Mapping[str, LoraLayer], names: Names) -> dict[str, Tensor]:
        if is_dora(layers):
            raise CheckpointError(
                "a DoRA can't be exported for ComfyUI, which divides by the norm of the base weight where DoRA divides "
                "by that of the sum",
                "export it as merged, or use it with diffusers or `qflux predict`.",
            )
        return {
            f"{PREFIX}{name.replace('.', '_')}{suffix}": tensor
            for name, layer in names.to_original(layers).items()
            for suffix, tensor in tensors_of(layer, _SUFFIXES)
        }

    def rounded(self, layers: Mapping[str, LoraLayer], names: Names) -> set[str]:
        return names.rounded(layers)

    def parts(self, layers: Mapping[str, LoraLayer], names: Names) -> Parts:
        return names.parts(layers)


COMFYUI = ComfyuiFormat()
