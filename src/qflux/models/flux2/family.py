"""FLUX.2 as a family: klein and dev differ in text encoder and guidance, and a checkpoint says which it is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import AutoTokenizer, Mistral3ForConditionalGeneration, Qwen3ForCausalLM

from qflux.data.images.sizes import Transform
from qflux.errors import CheckpointError
from qflux.models.family import Arithmetic, Family, InputWidths, ModelInputs
from qflux.models.flux2.components import Flux2Components
from qflux.models.flux2.encoders import READERS, Flux2Encoder, text_counter
from qflux.models.flux2.facts import FACTS
from qflux.models.flux2.names import SWAPPED, original_names
from qflux.models.flux2.positions import image_ids, text_ids
from qflux.models.flux2.schedule import Flux2Shift
from qflux.models.flux2.tiny import tiny
from qflux.models.flux2.transformer import Flux2Transformer2DModel
from qflux.models.loading import checkpoint_folder, load_other, load_part, require_template

_TEXT_ENCODERS: dict[str, Any] = {"qwen3": Qwen3ForCausalLM, "mistral3": Mistral3ForConditionalGeneration}
REFERENCE_AREA = 1024 * 1024
"""What the pipelines bring larger images to."""


def load(pretrained: str, parts: Sequence[str], dtype: torch.dtype, device: torch.device) -> Flux2Components:
    folder = checkpoint_folder(pretrained, parts)
    components = Flux2Components()
    for part in parts:
        if part == "scheduler":
            components.scheduler = load_other(FlowMatchEulerDiscreteScheduler, folder, part)
        elif part == "tokenizer":
            components.tokenizer = require_template(load_other(AutoTokenizer, folder, part), folder / part)
        else:
            loaders = {"transformer": Flux2Transformer2DModel, "vae": AutoencoderKLFlux2}
            loader = loaders.get(part) or _text_encoder(folder)
            setattr(components, part, load_part(loader, folder, part, dtype, device))
    return components


def _text_encoder(folder: Path) -> Any:
    """The class of a checkpoint's text encoder, klein's or dev's; an error if the transformer needs another."""
    config = _description(folder / "text_encoder")
    kind = config.get("model_type")
    if kind not in READERS:
        raise CheckpointError(
            f"{folder / 'text_encoder'} is of the type {kind!r}",
            "FLUX.2 klein reads prompts with qwen3, dev with mistral3: give a checkpoint that has one of them.",
        )
    text, layers = config.get("text_config", config), READERS[kind].layers
    offered, deepest = len(layers) * text.get("hidden_size", 0), text.get("num_hidden_layers", 0)
    wanted = (
        _description(folder / "transformer").get("joint_attention_dim") if (folder / "transformer").is_dir() else None
    )
    if wanted not in (None, offered) or deepest < layers[-1]:
        raise CheckpointError(
            f"{folder / 'text_encoder'} has {deepest} layers and gives {offered} channels; "
            f"the transformer needs {layers[-1]} layers or more and {wanted or offered} channels",
            "take text_encoder/ and tokenizer/ from the checkpoint that the transformer is of.",
        )
    return _TEXT_ENCODERS[kind]


def _description(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} can't be read: {error}", "fetch it again.") from error


def velocity(transformer: Any, inputs: ModelInputs) -> Tensor:
    """`(N, C)` the transformer's prediction, of which the rows of targets mean something."""
    dtype, device = transformer.dtype, inputs.images.device
    guidance = torch.full_like(inputs.sigma, inputs.guidance) if transformer.config.guidance_embeds else None
    return transformer(
        hidden_states=inputs.images.to(dtype),
        encoder_hidden_states=torch.cat([item.tokens for item in inputs.text]).to(dtype),
        timestep=inputs.sigma.to(dtype),
        img_ids=image_ids(inputs.shapes, device),
        txt_ids=text_ids([len(item.tokens) for item in inputs.text], device),
        guidance=guidance,
        layout=inputs.layout(),
        return_dict=False,
    )[0]


def reference_view(width: int, height: int) -> Transform:
    """Larger images are brought to a megapixel, and all of them cut to whole tokens."""
    step = FACTS["flux2"].size_multiple
    scale = math.sqrt(REFERENCE_AREA / (width * height)) if width * height > REFERENCE_AREA else 1.0
    inner = (max(step, int(height * scale)), max(step, int(width * scale)))
    return Transform((inner[0] // step * step, inner[1] // step * step), "cut", step, inner)


def combine(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    return unconditional + scale * (conditional - unconditional)


def blocks(transformer: Any) -> list[nn.Module]:
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def widths(transformer: Any) -> InputWidths:
    config = transformer.config
    projected = config.num_attention_heads * config.attention_head_dim
    return InputWidths(config.joint_attention_dim, config.in_channels, projected_text=projected)


def arithmetic(transformer: Any) -> Arithmetic:
    """A token meets 4 width² weights of attention in a block and 3 r width² of a gated MLP, r times as wide."""
    config = transformer.config
    width, count = config.num_attention_heads * config.attention_head_dim, len(blocks(transformer))
    return Arithmetic(per_token=2 * (4 + 3 * config.mlp_ratio) * width**2 * count, per_pair=4 * width * count)


FLUX2 = Family(
    facts=FACTS["flux2"],
    text_parts=("text_encoder", "tokenizer"),
    image_parts=("vae",),
    tokenizer_parts=("tokenizer",),
    prompt_view=lambda index, size, transform: None,
    reference_view=reference_view,
    tiny=tiny,
    transformer=Flux2Transformer2DModel,
    load=load,
    encoder=Flux2Encoder,
    text_counter=text_counter,
    velocity=velocity,
    combine=combine,
    blocks=blocks,
    widths=widths,
    arithmetic=arithmetic,
    noise_shift=Flux2Shift.of,
    lora_prefix="transformer.",
    lora_alphas=False,
    original_names=original_names,
    swapped_names=SWAPPED,
)
FAMILIES = {FLUX2.name: FLUX2}
