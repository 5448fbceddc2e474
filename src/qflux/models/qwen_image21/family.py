"""Qwen-Image-2.1 as a family: text to image and edits of up to ten images, with or without transparency."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qflux.data.images.sizes import Transform
from qflux.losses.timesteps import NoiseShift
from qflux.models.family import Arithmetic, Family, InputWidths, ModelInputs
from qflux.models.loading import checkpoint_folder, load_other, load_part, require_template
from qflux.models.qwen_image.prompts import REFERENCE_AREA, condition_size
from qflux.models.qwen_image21.arrangement import pairs_of
from qflux.models.qwen_image21.components import QwenImage21Components
from qflux.models.qwen_image21.encoders import QwenImage21Encoder, text_counter
from qflux.models.qwen_image21.facts import FACTS
from qflux.models.qwen_image21.layout import QwenImage21Layout
from qflux.models.qwen_image21.prompts import PromptProcessor
from qflux.models.qwen_image21.tiny import tiny
from qflux.models.qwen_image21.transformer import QwenImage21Transformer2DModel

_MODELS: dict[str, Any] = {
    "transformer": QwenImage21Transformer2DModel,
    "vae": AutoencoderKLQwenImage21,
    "text_encoder": Qwen3VLForConditionalGeneration,
}


def load(pretrained: str, parts: Sequence[str], dtype: torch.dtype, device: torch.device) -> QwenImage21Components:
    folder = checkpoint_folder(pretrained, parts)
    components = QwenImage21Components()
    for part in parts:
        if part in _MODELS:
            setattr(components, part, load_part(_MODELS[part], folder, part, dtype, device))
    if "scheduler" in parts:
        components.scheduler = load_other(FlowMatchEulerDiscreteScheduler, folder, "scheduler")
    if "processor" in parts:
        tokenizer = require_template(load_other(AutoTokenizer, folder, "processor"), folder / "processor")
        components.processor = PromptProcessor(tokenizer, load_other(Qwen2VLImageProcessorPil, folder, "processor"))
    return components


def velocity(transformer: Any, inputs: ModelInputs) -> Tensor:
    """`(N, C)` the transformer's prediction, of which the rows of targets mean something."""
    dtype, memory = transformer.dtype, inputs.memory
    layout = memory.layout if memory else None
    if layout is None:
        places = [text.places for text in inputs.text]
        layout = QwenImage21Layout.build(
            inputs.text_lengths, inputs.shapes, places, inputs.images.device, inputs.padded
        )
    if memory:
        memory.layout = layout
    return transformer(
        hidden_states=inputs.images.to(dtype),
        encoder_hidden_states=torch.cat([item.tokens for item in inputs.text]).to(dtype),
        timestep=inputs.sigma.to(dtype),
        layout=layout,
        memory=memory,
        return_dict=False,
    )[0]


def combine(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    return unconditional + scale * (conditional - unconditional)


def blocks(transformer: Any) -> list[nn.Module]:
    return list(transformer.transformer_blocks)


def widths(transformer: Any) -> InputWidths:
    return InputWidths(transformer.config.context_in_dim, transformer.config.in_channels, has_places=True)


def arithmetic(transformer: Any) -> Arithmetic:
    """A token meets 4 width² weights of attention in a block and 3 r width² of a gated MLP, r times as wide."""
    config = transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    return Arithmetic(
        per_token=2 * (4 + 3 * config.mlp_ratio) * width**2 * config.num_layers, per_pair=4 * width * config.num_layers
    )


def original_names(layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Elsewhere the two inner projections of the MLP are one layer, the gate first."""
    blocks = {match[1] for name in layers if (match := re.match(r"(transformer_blocks\.\d+)\.img_mlp\.", name))}
    return {
        f"{block}.img_mlp.gate_up": (f"{block}.img_mlp.gate_layer", f"{block}.img_mlp.proj") for block in sorted(blocks)
    }


QWEN_IMAGE_21 = Family(
    facts=FACTS["qwen-image-2.1"],
    text_parts=("text_encoder", "processor"),
    image_parts=("vae",),
    tokenizer_parts=("processor",),
    prompt_view=lambda index, size, transform: transform,
    reference_view=lambda width, height: Transform(condition_size(width, height, REFERENCE_AREA), "stretch", 32),
    result_like=-1,
    tiny=tiny,
    transformer=QwenImage21Transformer2DModel,
    load=load,
    encoder=QwenImage21Encoder,
    text_counter=text_counter,
    velocity=velocity,
    pairs=pairs_of,
    combine=combine,
    blocks=blocks,
    widths=widths,
    arithmetic=arithmetic,
    noise_shift=NoiseShift.of,
    lora_prefix="",
    original_names=original_names,
    keeps_names=True,
)
FAMILIES = {QWEN_IMAGE_21.name: QWEN_IMAGE_21}
