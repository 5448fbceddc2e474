"""Prompts as Qwen3-VL reads them for Qwen-Image-2.1: a template around the words, and images before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from transformers import BatchFeature

from qflux.models.qwen_image.prompts import IMAGE_TOKEN, VISION, expand

SYSTEM = "Comprehend and analyze the provided prompt."
"""What the model is told first; it is left out of the embedding."""


def fill(prompt: str, images: int) -> str:
    """The whole text. An empty prompt is a space: the encoder has to read something."""
    shown = " ".join(f"<image{number}>{VISION}" for number in range(1, images + 1))
    turns = (f"system\n{SYSTEM}<|im_end|>\n", f"user\n{shown}{prompt or ' '}<|im_end|>\n", "assistant\n")
    return "".join(f"<|im_start|>{turn}" for turn in turns)


def over_white(image: Image.Image) -> Image.Image:
    """What the vision encoder sees: it knows no transparency."""
    if image.mode != "RGBA":
        return image
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


class PromptProcessor:
    """Tokenizer and image processor as one, the part of `Qwen3VLProcessor` that images need.

    The full processor also loads a video processor, and with it torchvision. Images keep their size, whatever it is: a
    place in the text stands for 32 x 32 pixels, and the transformer puts as many tokens there.
    """

    saved_as = ("transformers", "Qwen3VLProcessor")
    """Library and class that other programs load it with."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        message = {"role": "system", "content": [{"type": "text", "text": SYSTEM}]}
        self.drop = len(self.apply_chat_template([message], tokenize=True, return_dict=False)[0])
        """Tokens of the system's message, as the checkpoint's own template writes it: the pipeline counts so."""

    def save_pretrained(self, folder: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """As the pipeline asks for the length of its system message: a batch of one."""
        return self.tokenizer.apply_chat_template([conversation], **options)

    def __call__(
        self, text: Sequence[str], images: Sequence[Image.Image] | None = None, **options: Any
    ) -> BatchFeature:
        """Token ids of the texts, in which every image token is repeated once for each of its image's places."""
        texts, features = list(text), {}
        if images:
            features = dict(self.image_processor(images=list(images), do_resize=False, return_tensors="pt"))
            counts = iter(self.counts(features["image_grid_thw"]))
            texts = [expand(item, counts) for item in texts]
        tokens = self.tokenizer(texts, **options)
        kinds = {"mm_token_type_ids": (tokens["input_ids"] == self.image_token).int()}
        return BatchFeature({**tokens, **features, **kinds}, tensor_type=None)

    def counts(self, grids: Any) -> list[int]:
        """Places in the text for images of these grids of patches."""
        merged: list[int] = (grids.prod(-1) // self.image_processor.merge_size**2).tolist()
        return merged

    def count(self, prompt: str, images: int) -> int:
        """Tokens of a prompt with so many images, without their places."""
        return len(self.tokenizer(fill(prompt, images)).input_ids) - images - self.drop
