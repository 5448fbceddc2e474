"""Edits: prepare → schedule → denoise → decode. A batch of any sizes; each result is what it would be alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from qflux.config import STEP, Config
from qflux.data.encoded import Prompt
from qflux.data.geometry import ImageProcessor
from qflux.data.images import to_image, to_pixels, to_rgb
from qflux.errors import DataError
from qflux.models.family import Family, text_limit
from qflux.ragged.layout import ImageShape
from qflux.ragged.patches import pack, token_shape
from qflux.sampling.sampler import OnStep, Prepared, Sampler

MOST_PIXELS = 4096 * 4096


@dataclass(frozen=True)
class Edit:
    """One edit to make: control images (the first is the one to edit), a prompt, a seed, and `(height, width)`.

    A negative prompt switches true classifier-free guidance on.
    """

    controls: tuple[Image.Image, ...]
    prompt: str
    prompt_2: str | None = None
    negative_prompt: str | None = None
    seed: int = 0
    size: tuple[int, int] | None = None


class Predictor:
    """A model ready to edit. The config's preprocessing is applied: what the model was trained on is what it gets."""

    def __init__(self, family: Family, components: Any, config: Config) -> None:
        self._family = family
        self._transformer = components.transformer
        self._sampler = Sampler(family, components.transformer, components.scheduler)
        self._encoder = family.encoder(components, text_limit(config, family))
        self._processor = ImageProcessor(config.data.processor)
        self._settings = config.predict

    def __call__(
        self,
        edits: Sequence[Edit],
        steps: int | None = None,
        guidance: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[Image.Image]:
        """The edited images; steps and guidance are the config's unless given."""
        results = self.latents(edits, steps, guidance, on_step)
        return [to_image(self._encoder.decode_image(tokens, shape)) for tokens, shape in results]

    @torch.no_grad()
    def latents(
        self,
        edits: Sequence[Edit],
        steps: int | None = None,
        guidance: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[tuple[Tensor, ImageShape]]:
        """Denoised tokens of every edit, with their shapes."""
        settings, defaults = self._settings, self._family.defaults
        prepared = [self._prepare(edit) for edit in edits]
        tokens = self._sampler(
            prepared,
            steps or settings.num_inference_steps or defaults.num_inference_steps,
            settings.guidance_scale if guidance is None else guidance,
            defaults.true_cfg_scale if settings.true_cfg_scale is None else settings.true_cfg_scale,
            on_step,
        )
        return [(latents, item.target) for latents, item in zip(tokens, prepared, strict=True)]

    def _prepare(self, edit: Edit) -> Prepared:
        device, dtype = self._transformer.device, self._transformer.dtype
        self._family.check_controls(len(edit.controls), "edit")
        controls, shapes, seen = [], [], []
        for index, image in enumerate(map(to_rgb, edit.controls)):
            name = f"control image {index + 1}"
            if index == 0:
                transform = self._processor.target(image.width, image.height, name)
            else:
                transform = self._processor.control(index - 1, image.width, image.height, name)
            controls.append(self._encoder.encode_images([to_pixels(transform(image))])[0].to(device))
            shapes.append(token_shape(*transform.size))
            view = self._family.prompt_view(index, image.size, transform)
            seen += [view(image)] if view else []
        target = token_shape(*_checked(edit.size)) if edit.size else (shapes or [self._default_shape()])[0]
        _, rows, columns = target
        generator = torch.Generator().manual_seed(edit.seed)
        channels = self._family.image_channels // 4
        noise = pack(torch.randn(channels, 2 * rows, 2 * columns, generator=generator, dtype=dtype)).to(device)
        prompts = [Prompt(edit.prompt, edit.prompt_2, tuple(seen))]
        if edit.negative_prompt is not None:
            prompts.append(Prompt(edit.negative_prompt, images=tuple(seen)))
        text, *negative = self._encoder.encode_text(prompts)
        return Prepared(
            noise=noise,
            controls=torch.cat(controls or [noise[:0]]),
            img_shapes=(target, *shapes),
            text=text,
            negative=negative[0] if negative else None,
        )

    def _default_shape(self) -> ImageShape:
        """Without an image to edit and without a size: a square of the configured area."""
        return token_shape(*self._processor.target(1024, 1024).size)


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    if any(side < STEP or side % STEP for side in size):
        raise DataError(f"the size {size[0]}x{size[1]} is not possible", f"use multiples of {STEP} pixels.")
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError(f"the size {size[0]}x{size[1]} is beyond anything the models know", "use at most 4096x4096.")
    return size
