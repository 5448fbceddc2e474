"""Qwen-Image's encoders: Qwen2.5-VL, which also sees images, and the VAE.

Shapes: l text tokens, n tokens of one image, C = 64 channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qflux.data.encoded import Prompt, TextEmbedding, TextLimit
from qflux.models.family import TextCount, TextCounter
from qflux.models.qwen_image.components import QwenImageComponents
from qflux.models.qwen_image.facts import FACTS
from qflux.models.qwen_image.prompts import PromptProcessor, Template, split_valid
from qflux.ragged.patches import pack, patch_noise, unpack
from qflux.ragged.shapes import ImageShape

CHANNELS = FACTS["qwen-image"].image_channels


class QwenImageEncoder:
    """Encodes as diffusers' Qwen pipelines do; a prompt keeps exactly its own tokens."""

    def __init__(self, components: QwenImageComponents, limit: TextLimit, template: Template) -> None:
        self._parts = components
        self._limit = limit
        self._template = template

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[Prompt]) -> list[TextEmbedding]:
        encoder = self._parts.text_encoder
        processor = self._parts.processor or PromptProcessor(self._parts.tokenizer, None)
        words = [self._template.words(processor, prompt.text) for prompt in prompts]
        cut = [self._limit.apply(count, prompt.text) for count, prompt in zip(words, prompts, strict=True)]
        texts = [self._template.fill(prompt.text, len(prompt.images)) for prompt in prompts]
        inputs = processor(text=texts, images=[i for p in prompts for i in p.images] or None).to(encoder.device)
        # The pipelines pass nothing that tells image tokens from text tokens, so neither does this: see decisions.md.
        hidden = encoder.model(  # without its head, which would make a word of every token
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            pixel_values=inputs.get("pixel_values"),
            image_grid_thw=inputs.get("image_grid_thw"),
            output_hidden_states=True,
        ).hidden_states[-1]
        embeddings = split_valid(hidden, inputs["attention_mask"], self._template.drop)
        # Images come before the words, so what is beyond the limit is cut off the end and the images stay whole.
        kept = [len(t) - max(0, count - self._limit.tokens) for t, count in zip(embeddings, words, strict=True)]
        return [TextEmbedding(t[:end], is_cut=is_cut) for t, end, is_cut in zip(embeddings, kept, cut, strict=True)]

    @torch.no_grad()
    def encode_images(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        vae = self._parts.vae
        frames = torch.stack(list(pixels))[:, :, None].to(vae.device, vae.dtype)
        latents = vae.encode(frames).latent_dist.mode()[:, :, 0]
        mean, std = self._statistics(latents)
        return [pack((item - mean) / std) for item in latents]

    @torch.no_grad()
    def decode_image(self, tokens: Tensor, shape: ImageShape) -> Tensor:
        vae = self._parts.vae
        latents = unpack(tokens.to(vae.device, vae.dtype), shape)
        mean, std = self._statistics(latents)
        return vae.decode((latents * std + mean)[None, :, None]).sample[0, :, 0]

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return patch_noise(CHANNELS, shape, generator, dtype)

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each latent channel, `(C / 4, 1, 1)`."""
        config = self._parts.vae.config
        mean, std = (
            torch.tensor(values).to(like)[:, None, None] for values in (config.latents_mean, config.latents_std)
        )
        return mean, std


def text_counter(components: QwenImageComponents, limit: TextLimit, template: Template) -> TextCounter:
    """Counts as the encoder does: the template's leading tokens are dropped, an image is as long as its patches."""
    processor = components.processor or PromptProcessor(components.tokenizer, None)

    def count(prompt: str, sizes: Sequence[tuple[int, int]]) -> TextCount:
        total = processor.count(template.fill(prompt, len(sizes)), sizes) - template.drop
        words = template.words(processor, prompt)
        return TextCount(used=total - max(0, words - limit.tokens), wanted=words)

    return count
