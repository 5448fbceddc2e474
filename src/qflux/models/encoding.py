"""Encoders that go on with less memory: an image that does not fit is encoded or decoded in tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from qflux.data.encoded import Prompt, TextEmbedding, TextLimit
from qflux.models.family import Encoder, Family
from qflux.ragged.shapes import ImageShape

logger = logging.getLogger(__name__)

Made = TypeVar("Made")
_TILE = 512
"""Pixels of a tile's side."""


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
        if len(pixels) > 1:
            try:
                return self._encoder.encode_images(pixels)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        return [self._tried(partial(self._encoder.encode_images, [image]))[0] for image in pixels]

    def decode_image(self, tokens: Tensor, shape: ImageShape) -> Tensor:
        return self._tried(lambda: self._encoder.decode_image(tokens, shape))

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return self._encoder.noise(shape, generator, dtype)

    def _tried(self, work: Callable[[], Made]) -> Made:
        try:
            return work()
        except torch.OutOfMemoryError:
            pass  # what follows is outside of the handler: the error holds on to what it was raised from
        torch.cuda.empty_cache()
        logger.warning(
            "there is not enough memory for an image as a whole: it is encoded or decoded in overlapping tiles, with "
            "small differences where they meet"
        )
        with _tiles(self._vae):
            return work()


@contextmanager
def _tiles(vae: Any) -> Iterator[None]:
    """Let a VAE work in small tiles; left to themselves, some take images of up to a megapixel as a whole."""
    known = {
        name: getattr(vae, name) for name in ("tile_sample_min_size", "tile_latent_min_size") if hasattr(vae, name)
    }
    vae.enable_tiling()
    if len(known) == 2:
        factor = known["tile_sample_min_size"] / known["tile_latent_min_size"]
        vae.tile_sample_min_size = min(_TILE, known["tile_sample_min_size"])
        vae.tile_latent_min_size = int(vae.tile_sample_min_size / factor)
    try:
        yield
    finally:
        vae.disable_tiling()
        for name, value in known.items():
            setattr(vae, name, value)
