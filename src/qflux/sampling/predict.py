"""Edits: prepare → schedule → denoise → decode. A batch of any sizes; each result is what it would be alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from qflux.config import STEP, Config
from qflux.data.encoded import Prompt, TextEmbedding
from qflux.data.geometry import ImageProcessor
from qflux.data.images import to_image, to_pixels, to_rgb
from qflux.errors import DataError
from qflux.models.family import Family, ModelInputs
from qflux.ragged.interleave import Interleave
from qflux.ragged.layout import ImageShape, image_tokens
from qflux.ragged.patches import pack, token_shape
from qflux.sampling.sampler import denoise, schedules


@dataclass(frozen=True)
class Edit:
    """One edit to make: control images (the first is the one to edit), a prompt, a seed, and `(height, width)`."""

    controls: tuple[Image.Image, ...]
    prompt: str
    prompt_2: str | None = None
    seed: int = 0
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Prepared:
    noise: Tensor
    controls: list[Tensor]
    img_shapes: tuple[ImageShape, ...]
    text: TextEmbedding


class Predictor:
    """A model ready to edit. The config's preprocessing is applied: what the model was trained on is what it gets."""

    def __init__(self, family: Family, components: Any, config: Config) -> None:
        self._family = family
        self._transformer = components.transformer
        self._scheduler = components.scheduler
        self._encoder = family.encoder(components, config.model.max_sequence_length)
        self._processor = ImageProcessor(config.data.processor)

    @torch.no_grad()
    def latents(
        self, edits: Sequence[Edit], steps: int, guidance: float, on_step: Callable[[int, int], None] | None = None
    ) -> list[tuple[Tensor, ImageShape]]:
        """Denoised tokens of every edit, with their shapes."""
        prepared = [self._prepare(edit) for edit in edits]
        shapes = [item.img_shapes for item in prepared]
        targets = [image_tokens(item.img_shapes[:1]) for item in prepared]
        controls = [image_tokens(item.img_shapes[1:]) for item in prepared]
        noise = torch.cat([item.noise for item in prepared])
        fixed = torch.cat([tokens for item in prepared for tokens in item.controls] or [noise[:0]])
        images = Interleave.build(targets, controls, noise.device)

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            inputs = ModelInputs(images.join(latents, fixed), shapes, [item.text for item in prepared], sigma, guidance)
            return images.split(self._family.velocity(self._transformer, inputs))[0]

        sigmas, told = schedules(self._scheduler, targets, steps, noise.device)
        final = denoise(velocity, noise, images.first_sample, sigmas, told, on_step)
        return list(zip(final.split(targets), (item.img_shapes[0] for item in prepared), strict=True))

    def __call__(
        self, edits: Sequence[Edit], steps: int, guidance: float, on_step: Callable[[int, int], None] | None = None
    ) -> list[Image.Image]:
        """The edited images."""
        results = self.latents(edits, steps, guidance, on_step)
        return [to_image(self._encoder.decode_image(tokens, shape)) for tokens, shape in results]

    def _prepare(self, edit: Edit) -> _Prepared:
        device, dtype = self._transformer.device, self._transformer.dtype
        controls, shapes = [], []
        for index, image in enumerate(map(to_rgb, edit.controls)):
            name = f"control image {index + 1}"
            if index == 0:
                transform = self._processor.target(image.width, image.height, name)
            else:
                transform = self._processor.control(index - 1, image.width, image.height, name)
            controls.append(self._encoder.encode_image(to_pixels(transform(image))).to(device))
            shapes.append(token_shape(*transform.size))
        target = token_shape(*_checked(edit.size)) if edit.size else (shapes or [self._default_shape()])[0]
        _, rows, columns = target
        generator = torch.Generator().manual_seed(edit.seed)
        channels = self._family.image_channels // 4
        noise = torch.randn(channels, 2 * rows, 2 * columns, generator=generator, dtype=dtype)
        text = self._encoder.encode_text([Prompt(edit.prompt, edit.prompt_2)])[0]
        return _Prepared(pack(noise).to(device), controls, (target, *shapes), text)

    def _default_shape(self) -> ImageShape:
        """Without an image to edit and without a size: a square of the configured area."""
        return token_shape(*self._processor.target(1024, 1024).size)


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    if any(side < STEP or side % STEP for side in size):
        raise DataError(f"the size {size[0]}x{size[1]} is not possible", f"use multiples of {STEP} pixels.")
    return size
