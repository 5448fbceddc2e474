"""Text that has been through its transformer's own projection already.

Where a prompt is several layers of a text encoder side by side, the first thing the transformer does is to project it
to its own width. As long as that projection is frozen, its output can be cached instead: a third of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qflux.config import Config
from qflux.data.encoded import Prompt, TextEmbedding
from qflux.models.family import Encoder
from qflux.models.loading import transformer_layer
from qflux.models.registry import facts_of
from qflux.ragged.shapes import ImageShape


def projection_weights(config: Config, download: bool = True) -> dict[str, Tensor] | None:
    """The weights that text of a config is put through before it is kept; none if it is kept as it was encoded.

    Quantized weights of a checkpoint are none, nor is a layer whose output can't be told from its input.
    """
    layer = facts_of(config.family).text_projection
    if layer is None or not config.projects_text:
        return None
    weights = transformer_layer(config.model, layer, download)
    weight = weights["weight"]
    fits = weight.is_floating_point() and weight.ndim == 2 and weight.shape[0] != weight.shape[1]
    return weights if fits and weights.keys() <= {"weight", "bias"} else None


class TextProjection(nn.Linear):
    """A transformer's projection of text. What has its output's channels, and not its input's, has been through it."""

    def forward(self, text: Tensor) -> Tensor:
        is_projected = text.shape[-1] == self.out_features != self.in_features
        return text if is_projected else super().forward(text)


class ProjectedText:
    """An encoder whose text is projected as the transformer would project it."""

    def __init__(self, encoder: Encoder, weight: Tensor, bias: Tensor | None) -> None:
        self._encoder = encoder
        self._weight, self._bias = weight, bias

    @classmethod
    def of(cls, encoder: Encoder, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Encoder:
        bias = weights.get("bias")
        return cls(encoder, weights["weight"].to(device, dtype), None if bias is None else bias.to(device, dtype))

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[Prompt]) -> list[TextEmbedding]:
        return [
            replace(text, tokens=F.linear(text.tokens.to(self._weight), self._weight, self._bias))
            for text in self._encoder.encode_text(prompts)
        ]

    def encode_images(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        return self._encoder.encode_images(pixels)

    def decode_image(self, tokens: Tensor, shape: ImageShape) -> Tensor:
        return self._encoder.decode_image(tokens, shape)

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return self._encoder.noise(shape, generator, dtype)
