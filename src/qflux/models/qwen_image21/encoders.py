"""Qwen-Image-2.1's encoders: Qwen3-VL, which also sees images, and the VAE, which also sees what is transparent.

Shapes: l text tokens, n tokens of one image, C = 64 channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from einops import rearrange
from torch import Tensor

from qflux.data.encoded import Prompt, TextEmbedding, TextLimit
from qflux.errors import DataError
from qflux.models.family import TextCount, TextCounter
from qflux.models.qwen_image.prompts import IMAGE_TOKEN
from qflux.models.qwen_image21.components import QwenImage21Components
from qflux.models.qwen_image21.facts import FACTS
from qflux.models.qwen_image21.prompts import fill, over_white
from qflux.ragged.shapes import ImageShape

CHANNELS = FACTS["qwen-image-2.1"].image_channels


class QwenImage21Encoder:
    """Encodes as `QwenImage21Pipeline` does. Where the text has a place for an image, the embedding has none: it says
    after how many of its tokens the image comes."""

    def __init__(self, components: QwenImage21Components, limit: TextLimit) -> None:
        self._parts = components
        self._limit = limit

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[Prompt]) -> list[TextEmbedding]:
        return [self._encode_one(prompt) for prompt in prompts]

    def _encode_one(self, prompt: Prompt) -> TextEmbedding:
        encoder, processor = self._parts.text_encoder, self._parts.processor
        if IMAGE_TOKEN in prompt.text:
            raise DataError(f"a prompt holds {IMAGE_TOKEN}, which stands for an image", "write the prompt without it.")
        words = processor.count(prompt.text, 0)
        is_cut = self._limit.apply(words, prompt.text)
        seen = [over_white(image) for image in prompt.images]
        inputs = processor(text=[fill(prompt.text, len(seen))], images=seen, return_tensors="pt").to(encoder.device)
        language = encoder.model.language_model
        # The transformer was trained on the last layer before the norm behind it: here the norm gives its input back.
        handle = language.norm.register_forward_hook(lambda module, args, output: args[0])
        try:
            hidden = encoder.model(**inputs).last_hidden_state[0, processor.drop :]
        finally:
            handle.remove()
        is_image = inputs["mm_token_type_ids"][0, processor.drop :].bool()
        text = hidden[~is_image]
        kept = len(text) - max(0, words - self._limit.tokens)
        return TextEmbedding(text[:kept], is_cut=is_cut, places=self._places(is_image, inputs))

    def _places(self, is_image: Tensor, inputs: dict[str, Tensor]) -> tuple[int, ...]:
        """How many text tokens stand before each image."""
        if "image_grid_thw" not in inputs:
            return ()
        counts = self._parts.processor.counts(inputs["image_grid_thw"])
        firsts = is_image.nonzero().squeeze(1)[[0, *accumulate(counts[:-1])]]
        before: list[int] = (~is_image).cumsum(0)[firsts].tolist()
        return tuple(before)

    @torch.no_grad()
    def encode_images(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        vae = self._parts.vae
        frames = torch.stack(list(pixels))[:, :, None].to(vae.device, vae.dtype)
        latents = vae.encode(frames).latent_dist.mode()[:, :, 0]
        mean, std = self._statistics(latents)
        return [rearrange((item - mean) / std, "c h w -> (h w) c") for item in latents]

    @torch.no_grad()
    def decode_image(self, tokens: Tensor, shape: ImageShape) -> Tensor:
        vae = self._parts.vae
        latents = rearrange(tokens.to(vae.device, vae.dtype), "(h w) c -> c h w", h=shape[1])
        mean, std = self._statistics(latents)
        return vae.decode((latents * std + mean)[None, :, None]).sample[0, :, 0]

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        _, rows, columns = shape
        noise = torch.randn(CHANNELS, rows, columns, generator=generator, dtype=dtype)
        return rearrange(noise, "c h w -> (h w) c")

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each latent channel, `(C, 1, 1)`."""
        config = self._parts.vae.config
        mean, std = (
            torch.tensor(values).to(like)[:, None, None] for values in (config.latents_mean, config.latents_std)
        )
        return mean, std


def text_counter(components: QwenImage21Components, limit: TextLimit) -> TextCounter:
    """Counts as the encoder does, before it: places for images are no text, and "wanted" is what the limit is about."""
    processor = components.processor

    def count(prompt: str, sizes: Sequence[tuple[int, int]]) -> TextCount:
        words = processor.count(prompt, 0)
        return TextCount(used=processor.count(prompt, len(sizes)) - max(0, words - limit.tokens), wanted=words)

    return count
