"""A LoRA as it is, free of any file format: per layer two matrices and a strength.

Shapes: r rank, I inputs and O outputs of the layer.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qflux.errors import CheckpointError

FOREIGN = "give a complete LoRA that was made for this model."


@dataclass(frozen=True)
class LoraLayer:
    """What a LoRA adds to one linear layer: `alpha / r * up @ down`; DoRA also has a magnitude per output."""

    down: Tensor
    """`(r, I)`"""
    up: Tensor
    """`(O, r)`"""
    alpha: float
    magnitude: Tensor | None = None
    """`(O,)`"""

    @property
    def rank(self) -> int:
        return len(self.down)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def to(self, device: torch.device) -> LoraLayer:
        magnitude = None if self.magnitude is None else self.magnitude.to(device)
        return LoraLayer(self.down.to(device), self.up.to(device), self.alpha, magnitude)

    def at_strength_1(self) -> LoraLayer:
        """The same effect with an alpha that is the rank."""
        if self.scale == 1:
            return self
        return LoraLayer(self.down, (self.up.float() * self.scale).to(self.up.dtype), float(self.rank), self.magnitude)

    def added_to(self, current: Tensor, base: Tensor, weight: float = 1.0) -> Tensor:
        """`current` `(O, I)`, the base with the adapters before this one, with this one too, in float32.

        As in PEFT, DoRA takes its norm from the base alone and scales everything that came before it.
        """
        added = weight * self.scale * (self.up.float() @ self.down.float())
        if self.magnitude is None:
            return current + added
        norm = (base + added).norm(dim=1, keepdim=True)
        return self.magnitude.float()[:, None] / norm * (current + added)


LoraLayers = dict[str, LoraLayer]
"""By the name of the layer in diffusers' transformer."""


def linear_layers(transformer: nn.Module) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every linear layer, by name; of the base layer where an adapter sits on it."""
    return {
        name.removesuffix(".base_layer"): (module.out_features, module.in_features)
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }


def require_fitting(file: object, layers: Mapping[str, LoraLayer], shapes: Mapping[str, tuple[int, int]]) -> None:
    """An error, with the layer's name, if a LoRA does not fit a model with these linear layers."""
    if not layers:
        raise CheckpointError(f"{file} holds no LoRA layer", FOREIGN)
    for name, layer in layers.items():
        if name not in shapes:
            raise CheckpointError(f"{file}: the model has no layer {name}", FOREIGN)
        outputs, inputs = shapes[name]
        found = tuple(layer.down.shape), tuple(layer.up.shape)
        expected = (layer.rank, inputs), (outputs, layer.rank)
        if found != expected:
            raise CheckpointError(f"{file}: {name} has shapes {found}, the model needs {expected}", FOREIGN)
        if layer.magnitude is not None and tuple(layer.magnitude.shape) != (outputs,):
            raise CheckpointError(f"{file}: the magnitude of {name} has shape {tuple(layer.magnitude.shape)}", FOREIGN)
        for tensor in _tensors(layer):
            if not bool(tensor.float().isfinite().all()):
                raise CheckpointError(f"{file}: {name} holds NaN or infinite values", "train it again.")


def same(first: Mapping[str, LoraLayer], second: Mapping[str, LoraLayer], rounded: Container[str] = ()) -> str | None:
    """The first layer in which two LoRAs differ in any bit, if there is one; `rounded` ones may in the last."""
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second or first[name].alpha != second[name].alpha:
            return name
        for a, b in zip(_tensors(first[name]), _tensors(second[name]), strict=True):
            if name in rounded:
                equal = a.shape == b.shape and torch.allclose(a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=0)
            else:
                equal = torch.equal(a, b)
            if not equal:
                return name
    return None


def _tensors(layer: LoraLayer) -> Iterator[Tensor]:
    yield layer.down
    yield layer.up
    yield layer.up.new_zeros(0) if layer.magnitude is None else layer.magnitude
