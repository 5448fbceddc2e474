"""Edits: prepare → schedule → denoise → decode. A batch of any sizes; each result is what it would be alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from qflux.config import STEP, Config, ProcessorSettings
from qflux.data.encoded import Prompt
from qflux.data.geometry import ImageProcessor, Size, Transform
from qflux.data.images import to_image, to_pixels, to_rgb
from qflux.errors import DataError
from qflux.models.family import Family, text_limit
from qflux.ragged.layout import ImageShape, image_tokens
from qflux.ragged.patches import pack, token_shape
from qflux.sampling.sampler import OnStep, Prepared, Sampler

logger = logging.getLogger(__name__)

MOST_PIXELS, MOST_SIDE = 4096 * 4096, 8192


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
    """A model ready to edit. Images reach their size by `processor`, or without one as in the reference pipeline."""

    def __init__(
        self, family: Family, components: Any, config: Config, processor: ProcessorSettings | None = None
    ) -> None:
        self._family = family
        self._transformer = components.transformer
        self._sampler = Sampler(family, components.transformer, components.scheduler)
        self._encoder = family.encoder(components, text_limit(config, family))
        # What may be trained on is no reason not to edit: the limit on aspect ratios is the training's.
        self._processor_settings = processor and processor.model_copy(update={"max_aspect_ratio": None})
        self._processor = ImageProcessor(self._processor_settings) if self._processor_settings else None
        self._settings = config.predict
        self._told: set[str] = set()

    def __call__(
        self,
        edits: Sequence[Edit],
        steps: int | None = None,
        guidance: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[Image.Image]:
        """The edited images; steps and guidance are the config's unless given."""
        return self.draw([self.prepare(edit) for edit in edits], steps, guidance, on_step)

    def draw(
        self,
        prepared: Sequence[Prepared],
        steps: int | None = None,
        guidance: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[Image.Image]:
        """The images of prepared edits, as one batch."""
        latents = self._denoised(prepared, steps, guidance, on_step)
        with torch.no_grad():
            pixels = [self._encoder.decode_image(t, item.target) for t, item in zip(latents, prepared, strict=True)]
        return [to_image(image) for image in pixels]

    def latents(
        self,
        edits: Sequence[Edit],
        steps: int | None = None,
        guidance: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[tuple[Tensor, ImageShape]]:
        """Denoised tokens of every edit, with their shapes."""
        prepared = [self.prepare(edit) for edit in edits]
        tokens = self._denoised(prepared, steps, guidance, on_step)
        return [(latents, item.target) for latents, item in zip(tokens, prepared, strict=True)]

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, edits are those of the base."""
        has_some = bool(getattr(self._transformer, "peft_config", None))
        if has_some:
            self._transformer.disable_lora()
        try:
            yield
        finally:
            if has_some:
                self._transformer.enable_lora()

    def settings(self, steps: int | None = None, guidance: float | None = None) -> dict[str, Any]:
        """Everything besides the edit that its image depends on."""
        settings, defaults = self._settings, self._family.defaults
        cfg = defaults.true_cfg_scale if settings.true_cfg_scale is None else settings.true_cfg_scale
        return {
            "num_inference_steps": steps or settings.num_inference_steps or defaults.num_inference_steps,
            "guidance_scale": settings.guidance_scale if guidance is None else guidance,
            "true_cfg_scale": cfg,
            "preprocessing": self._processor_settings.model_dump(mode="json")
            if self._processor_settings
            else "pipeline",
        }

    def _denoised(
        self, prepared: Sequence[Prepared], steps: int | None, guidance: float | None, on_step: OnStep | None
    ) -> list[Tensor]:
        chosen = self.settings(steps, guidance)
        self._tell_of_guidance(prepared, chosen["true_cfg_scale"])
        return self._sampler(
            prepared,
            chosen["num_inference_steps"],
            chosen["guidance_scale"],
            chosen["true_cfg_scale"],
            on_step,
        )

    def _tell_of_guidance(self, prepared: Sequence[Prepared], scale: float) -> None:
        """Say once what has no effect: a negative prompt at scale 1, or a scale without a negative prompt."""
        has_negative = any(item.negative is not None for item in prepared)
        if has_negative and scale <= 1:
            self._tell(f"the negative prompt has no effect: predict.true_cfg_scale is {scale:g}; above 1 it has one")
        if not has_negative and (self._settings.true_cfg_scale or 0) > 1:
            self._tell(
                f"predict.true_cfg_scale {scale:g} has no effect without a negative prompt; a space is one (' ')"
            )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)

    def tokens(self, sizes: Sequence[tuple[int, int]], size: tuple[int, int] | None) -> int:
        """Image tokens of an edit with controls of these (width, height) and this output (height, width)."""
        target, transforms = self._transforms(sizes)
        shapes = [token_shape(*transform.size) for transform in transforms]
        return image_tokens([token_shape(*(_checked(size) if size else target)), *shapes])

    def _transforms(self, sizes: Sequence[tuple[int, int]]) -> tuple[Size, list[Transform]]:
        """The size `(height, width)` of the result, and how control images of these (width, height) reach theirs.

        The result is as large as the image to edit; without one it is a square.
        """
        if self._processor is None:
            views = [self._family.reference_view(width, height) for width, height in sizes]
            return (views[0] if views else self._family.reference_view(1024, 1024)).size, views
        target = self._processor.target(*(sizes[0] if sizes else (1024, 1024)))
        controls = [self._processor.control(index, *pixels, target) for index, pixels in enumerate(sizes)]
        return target.size, controls

    @torch.no_grad()
    def prepare(self, edit: Edit) -> Prepared:
        """Encode an edit."""
        device, dtype = self._transformer.device, self._transformer.dtype
        self._family.check_controls(len(edit.controls), "edit")
        controls, shapes, seen = [], [], []
        images = list(map(to_rgb, edit.controls))
        size, transforms = self._transforms([image.size for image in images])
        for index, (image, transform) in enumerate(zip(images, transforms, strict=True)):
            controls.append(self._encoder.encode_images([to_pixels(transform(image))])[0].to(device))
            shapes.append(token_shape(*transform.size))
            view = self._family.prompt_view(index, image.size, transform)
            seen += [view(image)] if view else []
        target = token_shape(*(_checked(edit.size) if edit.size else size))
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


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    if any(side < STEP or side % STEP for side in size):
        raise DataError(f"the size {size[0]}x{size[1]} is not possible", f"use multiples of {STEP} pixels.")
    if size[0] * size[1] > MOST_PIXELS or max(size) > MOST_SIDE:
        raise DataError(f"the size {size[0]}x{size[1]} is beyond anything the models know", "use at most 4096x4096.")
    return size
