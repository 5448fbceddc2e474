"""FLUX.2's encoders: Qwen3 (klein) or Mistral 3 (dev) for text, and the VAE with its batch-norm statistics.

Shapes: l text tokens, n tokens of one image, C = 128 channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from einops import rearrange
from torch import Tensor

from qflux.data.encoded import Prompt, TextEmbedding, TextLimit
from qflux.models.family import TextCount, TextCounter
from qflux.models.flux2.components import Flux2Components
from qflux.models.flux2.facts import FACTS
from qflux.ragged.patches import pack, unpack
from qflux.ragged.shapes import ImageShape

CHANNELS = FACTS["flux2"].image_channels


@dataclass(frozen=True)
class Reader:
    """How one of the two text encoders is asked: which conversation a prompt becomes, and which layers answer."""

    layers: tuple[int, int, int]
    """Hidden states that stand side by side in a text token."""
    system: str | None
    has_answer: bool
    """The conversation ends where an answer without thinking begins."""

    def text(self, tokenizer: Any, prompt: str) -> str:
        """The conversation, as the tokenizer's own template writes it."""
        if self.system is None:
            messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        else:  # its tokenizer counts places for images, and there are none
            turns = (("system", self.system), ("user", prompt.replace("[IMG]", "")))
            messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
        options = {"enable_thinking": False} if self.has_answer else {}
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=self.has_answer, **options
        )
        return text

    def tokenize(self, tokenizer: Any, prompts: Sequence[str], **options: Any) -> Any:
        """Token ids and mask of conversations; special tokens stand in the template, unless it has none."""
        texts = [self.text(tokenizer, prompt) for prompt in prompts]
        begins = tokenizer.bos_token is not None and texts[0].startswith(tokenizer.bos_token)
        return tokenizer(texts, add_special_tokens=not begins, **options)


KLEIN = Reader((9, 18, 27), None, has_answer=True)
DEV = Reader((10, 20, 30), SYSTEM_MESSAGE, has_answer=False)
READERS = {"qwen3": KLEIN, "mistral3": DEV}
"""By the `model_type` of a text encoder."""


class PatchedVae:
    """FLUX.2's VAE: a token is a patch of 2 x 2 latents, and its batch norm knows how tokens are distributed."""

    def __init__(self, components: Any) -> None:
        self._parts = components

    @torch.no_grad()
    def encode_images(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        vae = self._parts.vae
        latents = vae.encode(torch.stack(list(pixels)).to(vae.device, vae.dtype)).latent_dist.mode()
        mean, std = self._statistics(latents)
        return [(pack(item) - mean) / std for item in latents]

    @torch.no_grad()
    def decode_image(self, tokens: Tensor, shape: ImageShape) -> Tensor:
        vae = self._parts.vae
        tokens = tokens.to(vae.device, vae.dtype)
        mean, std = self._statistics(tokens)
        return vae.decode(unpack(tokens * std + mean, shape)[None]).sample[0]

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of a token, `(C,)`, from the VAE's batch norm."""
        norm, config = self._parts.vae.bn, self._parts.vae.config
        return norm.running_mean.to(like), torch.sqrt(norm.running_var + config.batch_norm_eps).to(like)


class Flux2Encoder(PatchedVae):
    """Encodes as `Flux2KleinPipeline` or `Flux2Pipeline` does, whichever the checkpoint is for.

    Padding tokens are kept: FLUX.2 has no text mask and attends to them.
    """

    def __init__(self, components: Flux2Components, limit: TextLimit) -> None:
        super().__init__(components)
        self._limit = limit

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[Prompt]) -> list[TextEmbedding]:
        encoder, tokenizer = self._parts.text_encoder, self._parts.tokenizer
        reader, texts = READERS[encoder.config.model_type], [prompt.text for prompt in prompts]
        counts = [len(ids) for ids in reader.tokenize(tokenizer, texts).input_ids]
        cut = [self._limit.apply(count, text) for count, text in zip(counts, texts, strict=True)]
        inputs = reader.tokenize(
            tokenizer, texts, padding="max_length", truncation=True, max_length=self._limit.tokens, return_tensors="pt"
        ).to(encoder.device)
        # The language model without its head: the logits of 512 tokens would take more memory than all layers.
        hidden = encoder.model(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, output_hidden_states=True, use_cache=False
        ).hidden_states
        tokens = torch.cat([hidden[layer] for layer in reader.layers], dim=-1)
        return [TextEmbedding(tokens[i], is_cut=cut[i]) for i in range(len(prompts))]

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        _, rows, columns = shape
        noise = torch.randn(CHANNELS, rows, columns, generator=generator, dtype=dtype)
        return rearrange(noise, "c h w -> (h w) c")


def text_counter(components: Flux2Components, limit: TextLimit) -> TextCounter:
    """Every prompt is padded to the limit, and the transformer attends to the padding."""
    tokenizer = components.tokenizer
    reader = KLEIN if "<|im_start|>" in tokenizer.chat_template else DEV

    def count(prompt: str, sizes: Sequence[tuple[int, int]]) -> TextCount:
        (ids,) = reader.tokenize(tokenizer, [prompt]).input_ids
        return TextCount(used=limit.tokens, wanted=len(ids))

    return count
