"""FLUX Kontext's encoders: CLIP (pooled), T5 (tokens) and the VAE.

Shapes: l text tokens, n tokens of one image, C = 64 channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qflux.data.encoded import Prompt, TextEmbedding, TextLimit
from qflux.models.family import TextCount, TextCounter
from qflux.models.flux_kontext.components import FluxKontextComponents
from qflux.models.flux_kontext.facts import FACTS
from qflux.ragged.patches import pack, patch_noise, unpack
from qflux.ragged.shapes import ImageShape

CHANNELS = FACTS["flux-kontext"].image_channels


class FluxKontextEncoder:
    """Encodes as `FluxKontextPipeline` does.

    T5's padding tokens are kept: FLUX has no text mask and attends to them.
    """

    def __init__(self, components: FluxKontextComponents, limit: TextLimit) -> None:
        self._parts = components
        self._limit = limit

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[Prompt]) -> list[TextEmbedding]:
        clip, t5 = self._parts.text_encoder, self._parts.text_encoder_2
        for_t5 = [prompt.text_2 or prompt.text for prompt in prompts]
        cut = [self._limit.apply(len(self._parts.tokenizer_2(text).input_ids), text) for text in for_t5]
        # CLIP reads the first 77 tokens whatever follows: its pooled vector is a summary, T5 has the whole prompt.
        clip_ids = _tokenize(self._parts.tokenizer, [p.text for p in prompts], self._parts.tokenizer.model_max_length)
        t5_ids = _tokenize(self._parts.tokenizer_2, for_t5, self._limit.tokens)
        pooled = clip(clip_ids.to(clip.device)).pooler_output
        tokens = t5(t5_ids.to(t5.device))[0]
        return [TextEmbedding(tokens[i], pooled[i], cut[i]) for i in range(len(prompts))]

    @torch.no_grad()
    def encode_images(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        vae = self._parts.vae
        latents = vae.encode(torch.stack(list(pixels)).to(vae.device, vae.dtype)).latent_dist.mode()
        return [pack((item - vae.config.shift_factor) * vae.config.scaling_factor) for item in latents]

    @torch.no_grad()
    def decode_image(self, tokens: Tensor, shape: ImageShape) -> Tensor:
        vae = self._parts.vae
        latents = unpack(tokens.to(vae.device, vae.dtype), shape)
        return vae.decode((latents / vae.config.scaling_factor + vae.config.shift_factor)[None]).sample[0]

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return patch_noise(CHANNELS, shape, generator, dtype)


def _tokenize(tokenizer: Any, texts: list[str], length: int) -> Tensor:
    """Token ids `(prompts, length)`, padded and cut."""
    return tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


def text_counter(components: FluxKontextComponents, limit: TextLimit) -> TextCounter:
    """Every prompt is padded to the limit, and the transformer attends to the padding."""

    def count(prompt: str, sizes: Sequence[tuple[int, int]]) -> TextCount:
        return TextCount(used=limit.tokens, wanted=len(components.tokenizer_2(prompt).input_ids))

    return count
