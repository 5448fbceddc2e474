"""Prompts as Qwen2.5-VL reads them: the chat template around the instruction, and the images in it.

Templates, dropped tokens and image sizes are those of diffusers' pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature

from qflux.errors import DataError

IMAGE_TOKEN = "<|image_pad|>"
VISION = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
CONDITION_AREA = 384 * 384
"""Of an image as Edit-Plus' text encoder sees it."""
REFERENCE_AREA = 1024 * 1024
"""Of an image as the VAE sees it, and of what is drawn."""
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    IMAGE_TOKEN,
    "<|video_pad|>",
)


@dataclass(frozen=True)
class Template:
    """What stands around a prompt, and how many leading tokens of it are dropped from the embedding."""

    system: str
    drop: int
    per_image: str = ""
    """Put before the prompt for image i (from 1)."""

    def fill(self, prompt: str, images: int) -> str:
        pictures = "".join(self.per_image.format(index + 1) for index in range(images))
        return (
            f"<|im_start|>system\n{self.system}<|im_end|>\n"
            f"<|im_start|>user\n{pictures}{prompt}<|im_end|>\n<|im_start|>assistant\n"
        )

    def words(self, processor: PromptProcessor, prompt: str) -> int:
        """Tokens that the limit on prompts is about: the embedding's, had the prompt no images."""
        return processor.count(self.fill(prompt, 0), []) - self.drop


DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
EDIT = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)
TEXT_TO_IMAGE = Template(DESCRIBE, drop=34)
ONE_IMAGE = Template(EDIT, drop=64, per_image=VISION)
PICTURES = Template(EDIT, drop=64, per_image="Picture {}: " + VISION)


class PromptProcessor:
    """Tokenizer and image processor as one, the part of `Qwen2_5_VLProcessor` that images need.

    The full processor also loads a video processor, and with it torchvision.
    """

    saved_as = ("transformers", "Qwen2_5_VLProcessor")
    """Library and class that other programs load it with."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor

    def save_pretrained(self, folder: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

    def __call__(
        self,
        text: Sequence[str],
        images: Sequence[Image.Image] | Image.Image | None = None,
        padding: bool = True,
        return_tensors: str = "pt",
    ) -> BatchFeature:
        """Token ids of the texts, in which every image token is repeated once for each of its image's patches."""
        texts, features = list(text), {}
        if images:
            listed = [images] if isinstance(images, Image.Image) else list(images)
            features = dict(self.image_processor(images=listed, return_tensors=return_tensors))
            merged = (features["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
            counts = iter(merged)
            texts = [expand(item, counts) for item in texts]
        tokens = self.tokenizer(texts, padding=padding, return_tensors=return_tensors)
        return BatchFeature({**tokens, **features}, tensor_type=None)

    def count(self, text: str, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of a text with images of these (height, width) in it, without the images."""
        merge = self.image_processor.merge_size**2 if sizes else 1
        patches = [
            self.image_processor.get_number_of_image_patches(height, width, {}) // merge for height, width in sizes
        ]
        return len(self.tokenizer(expand(text, iter(patches)) if sizes else text).input_ids)


def expand(text: str, counts: Any) -> str:
    """The text with each image token as often as the next count says; an error if there are more than counts."""
    first, *rest = text.split(IMAGE_TOKEN)
    repeated = [next(counts, None) for _ in rest]
    if None in repeated:
        raise DataError(f"a prompt holds {IMAGE_TOKEN}, which stands for an image", "write the prompt without it.")
    return first + "".join(IMAGE_TOKEN * (count or 0) + part for count, part in zip(repeated, rest, strict=True))


def condition_size(width: int, height: int, area: int = CONDITION_AREA) -> tuple[int, int]:
    """`(height, width)` of an image as the pipelines size it: about `area` pixels, multiples of 32."""
    ideal = math.sqrt(area * width / height)
    return max(1, round(ideal * height / width / 32)) * 32, max(1, round(ideal / 32)) * 32


def split_valid(hidden: torch.Tensor, mask: torch.Tensor, drop: int) -> list[torch.Tensor]:
    """The valid tokens of each row, without the first `drop`."""
    return [row[valid.bool()][drop:] for row, valid in zip(hidden, mask, strict=True)]
