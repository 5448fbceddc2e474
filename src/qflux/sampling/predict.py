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
from qflux.models.family import Family, ModelInputs, text_limit
from qflux.ragged.interleave import Interleave
from qflux.ragged.layout import ImageShape, image_tokens
from qflux.ragged.patches import pack, token_shape
from qflux.sampling.sampler import denoise, schedules

MOST_PIXELS = 4096 * 4096
OnStep = Callable[[int, int], None]


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


@dataclass(frozen=True)
class _Prepared:
    noise: Tensor
    controls: Tensor
    img_shapes: tuple[ImageShape, ...]
    text: TextEmbedding
    negative: TextEmbedding | None

    @property
    def target(self) -> ImageShape:
        return self.img_shapes[0]


class Predictor:
    """A model ready to edit. The config's preprocessing is applied: what the model was trained on is what it gets."""

    def __init__(self, family: Family, components: Any, config: Config) -> None:
        self._family = family
        self._transformer = components.transformer
        self._scheduler = components.scheduler
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
        targets = [image_tokens([item.target]) for item in prepared]
        noise = torch.cat([item.noise for item in prepared])
        sample = Interleave.build(targets, [0] * len(targets), noise.device).first_sample
        velocity = self._velocity(prepared, targets, settings.guidance_scale if guidance is None else guidance)
        count = steps or settings.num_inference_steps or defaults.num_inference_steps
        sigmas, told = schedules(self._scheduler, targets, count, noise.device)
        final = denoise(velocity, noise, sample, sigmas, told, on_step)
        return [(tokens, item.target) for tokens, item in zip(final.split(targets), prepared, strict=True)]

    def _velocity(
        self, prepared: list[_Prepared], targets: list[int], guidance: float
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """The guided velocity of all edits; conditional and unconditional samples run in one ragged batch."""
        scale = self._settings.true_cfg_scale
        scale = self._family.defaults.true_cfg_scale if scale is None else scale
        guided = [index for index, item in enumerate(prepared) if item.negative is not None and scale > 1]
        rows = [*range(len(prepared)), *guided]
        shapes = [prepared[row].img_shapes for row in rows]
        text = [item.text for item in prepared] + [prepared[row].negative or prepared[row].text for row in guided]
        controls = torch.cat([prepared[row].controls for row in rows])
        lengths = [targets[row] for row in rows]
        images = Interleave.build(lengths, [len(prepared[row].controls) for row in rows], controls.device)

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            parts = latents.split(targets)
            noisy = torch.cat([parts[row] for row in rows])
            inputs = ModelInputs(images.join(noisy, controls), shapes, text, sigma[rows], guidance)
            predicted = list(images.split(self._family.velocity(self._transformer, inputs))[0].split(lengths))
            for place, row in enumerate(guided):
                predicted[row] = self._family.combine(predicted[row], predicted[len(prepared) + place], scale)
            return torch.cat(predicted[: len(prepared)])

        return velocity

    def _prepare(self, edit: Edit) -> _Prepared:
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
        return _Prepared(
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
