"""Qwen-Image, Qwen-Image-Edit and Qwen-Image-Edit-Plus as families: one model, three ways to show it images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qflux.data.images.sizes import Transform
from qflux.losses.timesteps import NoiseShift
from qflux.models.family import Arithmetic, Family, InputWidths, ModelInputs, PromptView
from qflux.models.loading import checkpoint_folder, load_other, load_part
from qflux.models.qwen_image.components import QwenImageComponents
from qflux.models.qwen_image.encoders import QwenImageEncoder, text_counter
from qflux.models.qwen_image.facts import FACTS
from qflux.models.qwen_image.prompts import (
    ONE_IMAGE,
    PICTURES,
    REFERENCE_AREA,
    TEXT_TO_IMAGE,
    PromptProcessor,
    Template,
    condition_size,
)
from qflux.models.qwen_image.tiny import tiny
from qflux.models.qwen_image.transformer import QwenImageTransformer2DModel

_MODELS: dict[str, Any] = {
    "transformer": QwenImageTransformer2DModel,
    "vae": AutoencoderKLQwenImage,
    "text_encoder": Qwen2_5_VLForConditionalGeneration,
}


def load(pretrained: str, parts: Sequence[str], dtype: torch.dtype, device: torch.device) -> QwenImageComponents:
    folder = checkpoint_folder(pretrained, parts)
    components = QwenImageComponents()
    for part in parts:
        if part in _MODELS:
            setattr(components, part, load_part(_MODELS[part], folder, part, dtype, device))
    if "scheduler" in parts:
        components.scheduler = load_other(FlowMatchEulerDiscreteScheduler, folder, "scheduler")
    if "tokenizer" in parts:
        components.tokenizer = load_other(Qwen2Tokenizer, folder, "tokenizer")
    if "processor" in parts:
        image_processor = load_other(Qwen2VLImageProcessorPil, folder, "processor")
        components.processor = PromptProcessor(components.tokenizer, image_processor)
    return components


def velocity(transformer: Any, inputs: ModelInputs) -> Tensor:
    """`(N, C)` the transformer's prediction, of which the rows of targets mean something."""
    dtype = transformer.dtype
    return transformer(
        hidden_states=inputs.images.to(dtype),
        encoder_hidden_states=torch.cat([item.tokens for item in inputs.text]).to(dtype),
        timestep=inputs.sigma.to(dtype),
        img_shapes=[shapes.images for shapes in inputs.shapes],
        layout=inputs.layout(),
        return_dict=False,
    )[0]


def combine(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Guidance that keeps the length of each token's conditional velocity."""
    combined = unconditional + scale * (conditional - unconditional)
    return combined * (conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


def blocks(transformer: Any) -> list[nn.Module]:
    return list(transformer.transformer_blocks)


def _sees_none(index: int, size: tuple[int, int], transform: Transform) -> None:
    return None


def _sees_first(index: int, size: tuple[int, int], transform: Transform) -> Transform | None:
    """The image to edit, at the size it is trained on."""
    return transform if index == 0 else None


def _sees_all(index: int, size: tuple[int, int], transform: Transform) -> Transform:
    """Every image, at about 384 x 384 pixels."""
    return Transform(condition_size(*size), "stretch")


def widths(transformer: Any) -> InputWidths:
    return InputWidths(transformer.config.joint_attention_dim, transformer.config.in_channels)


def arithmetic(transformer: Any) -> Arithmetic:
    """A token meets 12 width² weights of its own stream in a block: 4 of attention, 8 of an MLP four times as wide."""
    width = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    count = len(blocks(transformer))
    return Arithmetic(per_token=24 * width**2 * count, per_pair=4 * width * count)


def _family(name: str, template: Template, view: PromptView) -> Family:
    sees_images = view is not _sees_none
    return Family(
        facts=FACTS[name],
        text_parts=("text_encoder", "tokenizer", *(["processor"] if sees_images else [])),
        image_parts=("vae",),
        tokenizer_parts=("tokenizer", *(["processor"] if sees_images else [])),
        prompt_view=view,
        reference_view=lambda width, height: Transform(condition_size(width, height, REFERENCE_AREA), "stretch"),
        tiny=partial(tiny, sees_images=sees_images),
        transformer=QwenImageTransformer2DModel,
        load=load,
        encoder=lambda components, limit: QwenImageEncoder(components, limit, template),
        text_counter=lambda components, limit: text_counter(components, limit, template),
        velocity=velocity,
        combine=combine,
        blocks=blocks,
        widths=widths,
        arithmetic=arithmetic,
        noise_shift=NoiseShift.of,
        lora_prefix="",
        original_names=lambda layers: {},
    )


QWEN_IMAGE = _family("qwen-image", TEXT_TO_IMAGE, _sees_none)
QWEN_IMAGE_EDIT = _family("qwen-image-edit", ONE_IMAGE, _sees_first)
QWEN_IMAGE_EDIT_PLUS = _family("qwen-image-edit-plus", PICTURES, _sees_all)
FAMILIES = {family.name: family for family in (QWEN_IMAGE, QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS)}
