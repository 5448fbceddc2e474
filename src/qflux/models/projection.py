"""Text that has been through its transformer's own projection already.

Where a prompt is several layers of a text encoder side by side, the first thing the transformer does is to project it
to its own width. As long as that projection is frozen, its output can be cached instead: a third of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qflux.data.encoded import Prompt, TextEmbedding
from qflux.models.family import Encoder
from qflux.ragged.shapes import ImageShape


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
