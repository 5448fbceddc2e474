"""Edits as a transformer sees them: sizes chosen, images and prompts encoded, noise drawn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image

from qflux.config import ProcessorSettings
from qflux.data.encoded import Prompt
from qflux.data.images.decode import to_rgb, to_rgba
from qflux.data.images.pixels import to_image, to_pixels
from qflux.data.images.sizes import AskedSize, Box, ImageProcessor, Size, Transform, possible_size
from qflux.errors import DataError
from qflux.models.family import Encoder, Family
from qflux.ragged.shapes import ImageShape, Shapes, image_tokens, token_shape
from qflux.sampling.sampler import Prepared

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Edit:
    """One edit to make: control images (the first is the one to edit), a prompt and a seed.

    A negative prompt switches true classifier-free guidance on.
    """

    controls: tuple[Image.Image, ...]
    prompt: str
    prompt_2: str | None = None
    negative_prompt: str | None = None
    seed: int = 0
    size: AskedSize = None
    """`(height, width)` of the result, or "input": that of the image to edit, which is brought to it too."""


class Preparer:
    """Encodes edits. Images reach their size by `processor`, or without one as in the reference pipeline."""

    def __init__(
        self,
        family: Family,
        encoder: Encoder,
        processor: ProcessorSettings | None,
        device: torch.device,
        dtype: torch.dtype,
        negative_prompt: str | None = None,
    ) -> None:
        """`negative_prompt` is for edits that have none."""
        self._negative = negative_prompt
        self._family = family
        self._encoder = encoder
        # What may be trained on is no reason not to edit: the limit on aspect ratios is the training's.
        self._settings = processor and processor.model_copy(update={"max_aspect_ratio": None})
        self._processor = ImageProcessor(self._settings, family.size_multiple) if self._settings else None
        self._device = device
        self._dtype = dtype
        self._warned: set[str] = set()

    @property
    def description(self) -> dict[str, Any] | str:
        """How images reach their size, for the notes of a result."""
        return self._settings.model_dump(mode="json") if self._settings else "pipeline"

    def negative_prompt(self, given: str | None) -> str | None:
        """What an edit is guided away from: what somebody says, or else what the checkpoint's pipeline takes."""
        return self._negative if given is None else given

    def tokens(self, sizes: Sequence[tuple[int, int]], asked: AskedSize = None) -> int:
        """Image tokens of an edit with controls of these (width, height) and a result of the size asked for."""
        target, transforms = self.transforms(sizes, asked)
        return image_tokens([self._grid(size) for size in (target, *(transform.size for transform in transforms))])

    def transforms(self, sizes: Sequence[tuple[int, int]], asked: AskedSize = None) -> tuple[Size, list[Transform]]:
        """The size `(height, width)` of the result, and how control images of these (width, height) reach theirs.

        The image to edit and the result share one transform: the models have learnt that a place in one is the same
        place in the other. Without an image to edit, and without a size asked for, the result is a square.
        """
        own = sizes[0] if sizes else (1024, 1024)
        if asked is not None:
            target = self._transform_to(asked, own, bool(sizes))
        elif self._processor is not None:
            target = self._processor.target(*own)
        else:
            view = self._family.reference_view
            views = [(self._family.lone_view or view if len(sizes) == 1 else view)(*pixels) for pixels in sizes]
            return (views[self._family.result_like] if views else view(*own)).size, views
        if self._processor is None:
            further = [self._family.reference_view(*pixels) for pixels in sizes[1:]]
            return target.size, [target, *further] if sizes else []
        controls = [self._processor.control(index, *pixels, target) for index, pixels in enumerate(sizes)]
        return target.size, controls

    def _transform_to(self, asked: Size | Literal["input"], own: tuple[int, int], has_image: bool) -> Transform:
        """How an image of `own` (width, height) reaches the size that somebody asked for."""
        (width, height), step = own, self._family.size_multiple
        if asked == "input":
            if not has_image:
                raise DataError('the size "input" is that of the image to edit, and there is none', "give a size.")
            # Less than a step is stretched, and stretched back in the result: not a pixel's place is lost.
            return Transform(possible_size((self._rounded(height), self._rounded(width)), step), "stretch")
        transform = Transform(possible_size(asked, step), self._processor.fit if self._processor else "crop", step)
        if has_image and transform.crops(width, height):
            left, top, right, bottom = transform.box(width, height)
            lost = 1 - (right - left) * (bottom - top) / (width * height)
            self._warn_once(
                f"an image of {width}x{height} has another aspect ratio than the {asked[1]}x{asked[0]} asked for: "
                f"{lost:.0%} of it is cut off; the size 'input' keeps all of it"
            )
        return transform

    @torch.no_grad()
    def __call__(self, edit: Edit) -> Prepared:
        """Encode an edit."""
        self._family.check_controls(len(edit.controls), "edit")
        controls, shapes, seen = [], [], []
        images = list(map(to_rgba if self._family.has_alpha else to_rgb, edit.controls))
        size, transforms = self.transforms([image.size for image in images], edit.size)
        for index, (image, transform) in enumerate(zip(images, transforms, strict=True)):
            controls.append(self._encoder.encode_images([to_pixels(transform(image))])[0].to(self._device))
            shapes.append(self._grid(transform.size))
            view = self._family.prompt_view(index, image.size, transform)
            seen += [view(image)] if view else []
        target = self._grid(size)
        generator = torch.Generator().manual_seed(edit.seed)
        noise = self._encoder.noise(target, generator, self._dtype).to(self._device)
        prompts = [Prompt(edit.prompt, edit.prompt_2, tuple(seen))]
        negative_prompt = self.negative_prompt(edit.negative_prompt)
        if negative_prompt is not None:
            prompts.append(Prompt(negative_prompt, images=tuple(seen)))
        text, *negative = self._encoder.encode_text(prompts)
        return Prepared(
            noise=noise,
            controls=torch.cat(controls or [noise[:0]]),
            shapes=Shapes((target,), tuple(shapes)),
            text=text,
            negative=negative[0] if negative else None,
            exact=images[0].size if edit.size == "input" else None,
            kept=self._kept(transforms, edit.size),
        )

    @torch.no_grad()
    def returned(self, edit: Edit, image: Image.Image) -> tuple[Image.Image, Image.Image]:
        """A picture of what an edit is of, at the size of its result and cut alike: as it is, and after the VAE.

        What the VAE does to a picture is not the edit's doing.
        """
        size, transforms = self.transforms([control.size for control in edit.controls], edit.size)
        own = transforms[0] if transforms and transforms[0].size == size else Transform(size, "crop")
        plain = own.aligned(*image.size)(to_rgb(image))
        pixels = to_pixels(to_rgba(plain) if self._family.has_alpha else plain)
        decoded = self._encoder.decode_image(self._encoder.encode_images([pixels])[0], self._grid(size))
        exact = edit.controls[0].size if edit.size == "input" else None
        kept = self._kept(transforms, edit.size)
        return finished(plain, exact, kept), finished(to_rgb(to_image(decoded)), exact, kept)

    def _kept(self, transforms: Sequence[Transform], asked: AskedSize) -> Box | None:
        return transforms[self._family.result_like].kept if transforms and asked is None else None

    def _grid(self, size: Size) -> ImageShape:
        return token_shape(*size, self._family.pixels_per_token)

    def _rounded(self, side: int) -> int:
        step = self._family.size_multiple
        return max(step, round(side / step) * step)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


def finished(image: Image.Image, exact: tuple[int, int] | None, kept: Box | None) -> Image.Image:
    """A result at the size that was asked for."""
    image = image if kept is None else image.crop(kept)
    return image if exact is None else image.resize(exact, Image.Resampling.LANCZOS)
