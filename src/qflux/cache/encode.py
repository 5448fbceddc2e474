"""From the images and the prompt of a sample to its embeddings: opened in a thread, encoded where the encoders are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qflux.data.encoded import COMPLETE, EncodedSample, Prompt, TextEmbedding, Variant
from qflux.data.images.decode import load_mask
from qflux.data.images.pixels import to_pixels
from qflux.data.sample import Sample, SampleImage
from qflux.errors import DataError
from qflux.models.family import Encoder
from qflux.ragged.patches import mask_to_tokens


@dataclass(frozen=True)
class OpenedSample:
    """A sample as its encoders need it: decoded, at its sizes, not encoded yet."""

    sample: Sample
    prompt: Prompt
    target: Tensor
    """Pixels `(3, H, W)` in [-1, 1]."""
    controls: tuple[Tensor, ...]
    mask: Tensor | None


def open_sample(sample: Sample, variant: Variant = COMPLETE) -> OpenedSample:
    """Read and transform the images of a sample."""
    images = sample.own_images
    controls = tuple(open_image(image) for image in images.controls) if variant.controls else ()
    return OpenedSample(sample, open_prompt(sample, variant), open_image(images.target), controls, open_mask(sample))


def encode_sample(opened: OpenedSample, encoder: Encoder) -> EncodedSample:
    """The same as the cache holds, made now."""
    shapes = opened.sample.shapes
    return EncodedSample(
        id=opened.sample.id,
        text=encode_prompt(opened.sample, opened.prompt, encoder),
        target=encoder.encode_images([opened.target])[0],
        shapes=shapes if opened.controls else shapes.without_controls(),
        controls=tuple(encoder.encode_images([pixels])[0] for pixels in opened.controls),
        mask=opened.mask,
    )


def open_image(image: SampleImage) -> Tensor:
    """Pixels `(3, H, W)` in [-1, 1] at training size."""
    return to_pixels(image.load())


def open_prompt(sample: Sample, variant: Variant = COMPLETE) -> Prompt:
    """The prompt with the images that the text encoder sees."""
    controls = sample.own_images.controls if variant.controls else ()
    seen = tuple(view for image in controls if (view := image.load_view()) is not None)
    if not variant.caption:
        return Prompt("", images=seen)
    return Prompt(sample.captions[variant.number], sample.prompt_2, seen)


def open_mask(sample: Sample) -> Tensor | None:
    """The mask in token space."""
    images = sample.own_images
    if images.mask is None:
        return None
    grey = images.target.transform(load_mask(images.mask, images.mask_hash), fill="black")
    _, rows, _ = sample.shapes.targets[0]
    return mask_to_tokens(torch.from_numpy(np.array(grey, dtype=np.float32))[None] / 255, grey.height // rows)[0]


def encode_prompt(sample: Sample, prompt: Prompt, encoder: Encoder) -> TextEmbedding:
    """The prompt of a sample; an error names the sample."""
    try:
        return encoder.encode_text([prompt])[0]
    except DataError as error:
        raise DataError(f"{sample.name}: {error.problem}", error.remedy) from None
