"""Encoders that go on with less memory: an image that does not fit is encoded or decoded in tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from qflux.data.encoded import Prompt, TextEmbedding, TextLimit
from qflux.models.family import Encoder, Family
from qflux.ragged.shapes import ImageShape

logger = logging.getLogger(__name__)

Made = TypeVar("Made")


def encoder_of(family: Family, components: Any, limit: TextLimit) -> Encoder:
    """The encoders of some components."""
    vae = next((getattr(components, part, None) for part in family.image_parts), None)
    encoder = family.encoder(components, limit)
    return encoder if vae is None else TiledAtNeed(encoder, vae)


class TiledAtNeed:
    """An encoder that takes an image as a whole, and in overlapping tiles from where memory runs out."""

    def __init__(self, encoder: Encoder, vae: Any) -> None:
        self._encoder = encoder
        self._vae = vae

    def encode_text(self, prompts: Sequence[Prompt]) -> list[TextEmbedding]:
        return self._encoder.encode_text(prompts)

    def encode_images(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        return self._tried(lambda: self._encoder.encode_images(pixels))

    def decode_image(self, tokens: Tensor, shape: ImageShape) -> Tensor:
        return self._tried(lambda: self._encoder.decode_image(tokens, shape))

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return self._encoder.noise(shape, generator, dtype)

    def _tried(self, work: Callable[[], Made]) -> Made:
        try:
            return work()
        except torch.OutOfMemoryError:
            if self._vae.use_tiling:
                raise
        # Outside of the handler: the error holds on to what it was raised from.
        torch.cuda.empty_cache()
        logger.warning(
            "there is not enough memory for an image as a whole: it is encoded or decoded in overlapping tiles, with "
            "small differences where they meet"
        )
        self._vae.enable_tiling()
        try:
            return work()
        finally:
            self._vae.disable_tiling()
