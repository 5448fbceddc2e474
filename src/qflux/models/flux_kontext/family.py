"""FLUX.1 Kontext as a family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from qflux.data.images.sizes import Transform, closest_aspect
from qflux.losses.timesteps import NoiseShift
from qflux.models.family import Arithmetic, Family, InputWidths, ModelInputs
from qflux.models.flux_kontext.components import FluxKontextComponents
from qflux.models.flux_kontext.encoders import FluxKontextEncoder, text_counter
from qflux.models.flux_kontext.facts import FACTS, KONTEXT_SIZES
from qflux.models.flux_kontext.names import SWAPPED, original_names
from qflux.models.flux_kontext.positions import image_ids
from qflux.models.flux_kontext.tiny import tiny
from qflux.models.flux_kontext.transformer import FluxTransformer2DModel
from qflux.models.loading import checkpoint_folder, load_other, load_part

_MODELS: dict[str, Any] = {
    "transformer": FluxTransformer2DModel,
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": T5EncoderModel,
}
_OTHERS: dict[str, Any] = {
    "scheduler": FlowMatchEulerDiscreteScheduler,
    "tokenizer": CLIPTokenizer,
    "tokenizer_2": T5TokenizerFast,
}


def load(pretrained: str, parts: Sequence[str], dtype: torch.dtype, device: torch.device) -> FluxKontextComponents:
    folder = checkpoint_folder(pretrained, parts)
    components = FluxKontextComponents()
    for part in parts:
        if part in _MODELS:
            setattr(components, part, load_part(_MODELS[part], folder, part, dtype, device))
        else:
            setattr(components, part, load_other(_OTHERS[part], folder, part))
    return components


def velocity(transformer: Any, inputs: ModelInputs) -> Tensor:
    """`(N, C)` the transformer's prediction, of which the rows of targets mean something."""
    dtype, device = transformer.dtype, inputs.images.device
    text = torch.cat([item.tokens for item in inputs.text]).to(dtype)
    pooled = torch.stack([item.pooled for item in inputs.text if item.pooled is not None]).to(dtype)
    guidance = None
    if transformer.config.guidance_embeds:
        guidance = torch.full_like(inputs.sigma, inputs.guidance)
    return transformer(
        hidden_states=inputs.images.to(dtype),
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=inputs.sigma.to(dtype),
        img_ids=image_ids(inputs.shapes, device),
        txt_ids=torch.zeros(len(text), 3, device=device),
        guidance=guidance,
        layout=inputs.layout(),
        return_dict=False,
    )[0]


def blocks(transformer: Any) -> list[nn.Module]:
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def combine(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    return unconditional + scale * (conditional - unconditional)


def widths(transformer: Any) -> InputWidths:
    config = transformer.config
    return InputWidths(config.joint_attention_dim, config.in_channels, config.pooled_projection_dim)


def arithmetic(transformer: Any) -> Arithmetic:
    """A token meets 12 width² weights in a block: 4 of attention, 8 of an MLP that is four times as wide."""
    width = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    count = len(blocks(transformer))
    return Arithmetic(per_token=24 * width**2 * count, per_pair=4 * width * count)


FLUX_KONTEXT = Family(
    facts=FACTS["flux-kontext"],
    text_parts=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    image_parts=("vae",),
    tokenizer_parts=("tokenizer_2",),
    prompt_view=lambda index, size, transform: None,
    reference_view=lambda width, height: Transform(closest_aspect(KONTEXT_SIZES, width, height), "stretch"),
    tiny=tiny,
    transformer=FluxTransformer2DModel,
    load=load,
    encoder=FluxKontextEncoder,
    text_counter=text_counter,
    velocity=velocity,
    combine=combine,
    blocks=blocks,
    widths=widths,
    arithmetic=arithmetic,
    noise_shift=NoiseShift.of,
    lora_prefix="transformer.",
    original_names=original_names,
    swapped_names=SWAPPED,
    usage_note="In ComfyUI, two or more reference images need the reference method `index` (node "
    "`FluxKontextMultiReferenceLatentMethod`): that is how they were numbered in training.",
)
FAMILIES = {FLUX_KONTEXT.name: FLUX_KONTEXT}
