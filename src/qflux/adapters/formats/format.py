"""What a file format of a LoRA is, and how the tensors of one layer are told apart by the ends of their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from qflux.adapters.layers import FOREIGN, LoraLayer
from qflux.adapters.names import Names, Parts
from qflux.errors import CheckpointError

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


class Format:
    """The names under which a LoRA's tensors are filed, and the way back."""

    name: ClassVar[str]
    has_original_names: ClassVar[bool] = False
    """Its layers may be called as the model's authors call them, with several of diffusers' in one."""

    def recognises(self, layers: Collection[str]) -> bool:
        """Whether a file whose layers have these names is in this format."""
        raise NotImplementedError

    def layer_name(self, name: str, names: Names) -> str | None:
        """The layer that a name in a file stands for; none if the model has no such layer."""
        raise NotImplementedError

    def write(self, layers: Mapping[str, LoraLayer], names: Names) -> dict[str, Tensor]:
        """The tensors of a LoRA under this format's names, from its layers as they are `filed`."""
        raise CheckpointError(f"LoRAs in the format {self.name} are read, not written", "choose another format.")

    def filed(self, layers: Mapping[str, LoraLayer], names: Names) -> Mapping[str, LoraLayer]:
        """A LoRA as this format keeps it: the same effect, perhaps of other matrices."""
        return layers

    def strength_in_metadata(self, layers: Mapping[str, LoraLayer], names: Names) -> bool:
        """Whether this LoRA is filed without alpha tensors, because the format's reader takes none of it."""
        return False

    def rounded(self, layers: Mapping[str, LoraLayer], names: Names) -> set[str]:
        """Layers whose way there and back rounds in the last bit."""
        return set()

    def parts(self, layers: Mapping[str, LoraLayer], names: Names) -> Parts:
        """What layers that this format fuses consist of: with it the way back is exact."""
        return {}


def part_of(key: str) -> tuple[str, str] | None:
    """The layer that a tensor is of, and which of its tensors it is; none if the name says nothing of the kind."""
    suffix = next((ending for ending in _SUFFIXES if key.endswith(ending)), None)
    return None if suffix is None else (key.removesuffix(suffix), _SUFFIXES[suffix])


def without_prefixes(name: str, prefixes: Iterable[str]) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


def tensors_of(layer: LoraLayer, suffixes: tuple[str, str, str]) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a layer by the ends of their names; `suffixes` are for down, up and magnitude."""
    down, up, magnitude = suffixes
    yield f".{down}", layer.down
    yield f".{up}", layer.up
    yield ".alpha", torch.tensor(layer.alpha, dtype=torch.float32)
    if layer.magnitude is not None:
        # kohya's tools keep it as a column
        yield f".{magnitude}", layer.magnitude[:, None] if magnitude == "dora_scale" else layer.magnitude


def layer_from(file: object, name: str, found: Mapping[str, Tensor], default: Callable[[str, int], float]) -> LoraLayer:
    """A layer from its tensors; `default` gives the alpha of one that has none."""
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


def is_dora(layers: Mapping[str, LoraLayer]) -> bool:
    return any(layer.magnitude is not None for layer in layers.values())
