"""FLUX.3's encoders: eight layers of Qwen3-VL for text, and FLUX.2's VAE.

Shapes: l text tokens, n tokens of one image, C = 128 channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from qflux.data.encoded import Prompt, TextEmbedding, TextLimit
from qflux.models.family import TextCount, TextCounter
from qflux.models.flux2.encoders import CHANNELS, PatchedVae
from qflux.models.flux3.components import Flux3Components
from qflux.ragged.shapes import ImageShape

LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)
"""Hidden states that stand side by side in a text token."""
WINDOW = 80
"""A prompt is padded to a multiple of this many tokens, and the transformer attends to the padding."""


class Flux3Encoder(PatchedVae):
    """Encodes as `Flux3ModularPipeline` does, but for the rewriting of prompts: what is written is what is encoded."""

    def __init__(self, components: Flux3Components, limit: TextLimit) -> None:
        super().__init__(components)
        self._parts: Any = components
        self._limit = limit

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[Prompt]) -> list[TextEmbedding]:
        return [self._encode_one(prompt.text) for prompt in prompts]

    def _encode_one(self, prompt: str) -> TextEmbedding:
        """One at a time: the length of the window is the prompt's own."""
        encoder, tokenizer = self._parts.text_encoder, self._parts.tokenizer
        text = conversation(tokenizer, prompt)
        count = len(tokenizer(text).input_ids)
        is_cut = self._limit.apply(count, prompt)
        inputs = tokenizer(
            text,
            padding="max_length",
            padding_side="right",
            truncation=True,
            max_length=window(count, self._limit),
            return_tensors="pt",
        ).to(encoder.device)
        # The model was trained where padding had the position 1; transformers has given it others since.
        positions = torch.arange(inputs.input_ids.shape[1], device=encoder.device)[None]
        hidden = encoder.model(  # without its head: the logits of 8,000 tokens would take gigabytes
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=positions.masked_fill(inputs.attention_mask == 0, 1),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        return TextEmbedding(torch.cat([hidden[layer] for layer in LAYERS], dim=-1)[0], is_cut=is_cut)

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        _, rows, columns = shape
        # Drawn in float32 whatever the dtype: half precision would draw other numbers.
        noise = torch.randn(CHANNELS, rows, columns, generator=generator).to(dtype)
        return rearrange(noise, "c h w -> (h w) c")


def conversation(tokenizer: Any, prompt: str) -> str:
    """A prompt as the tokenizer's own template writes it."""
    messages = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def window(count: int, limit: TextLimit) -> int:
    """The length that a prompt of so many tokens is brought to."""
    return min(-(-min(count, limit.tokens) // WINDOW) * WINDOW, limit.tokens)


def text_counter(components: Flux3Components, limit: TextLimit) -> TextCounter:
    """Counts the padding, which the transformer attends to."""
    tokenizer = components.tokenizer

    def count(prompt: str, sizes: Sequence[tuple[int, int]]) -> TextCount:
        wanted = len(tokenizer(conversation(tokenizer, prompt)).input_ids)
        return TextCount(used=window(wanted, limit), wanted=wanted)

    return count
