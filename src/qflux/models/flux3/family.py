"""FLUX.3 klein as a family: base and distilled, which a checkpoint says itself."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from qflux.data.images.sizes import Transform
from qflux.errors import CheckpointError
from qflux.losses.timesteps import NoiseShift
from qflux.models.family import Arithmetic, Family, ModelInputs
from qflux.models.flux2.family import combine, reference_view, widths
from qflux.models.flux2.positions import text_ids
from qflux.models.flux3.components import Flux3Components
from qflux.models.flux3.encoders import LAYERS, Flux3Encoder, text_counter
from qflux.models.flux3.facts import FACTS
from qflux.models.flux3.layout import Flux3Layout
from qflux.models.flux3.names import SWAPPED, original_names
from qflux.models.flux3.positions import control_ids, target_ids
from qflux.models.flux3.tiny import SHIFT, tiny
from qflux.models.flux3.transformer import Flux3Transformer2DModel
from qflux.models.loading import checkpoint_folder, load_other, load_part, require_template

_MODELS: dict[str, Any] = {
    "transformer": Flux3Transformer2DModel,
    "vae": AutoencoderKLFlux2,
    "text_encoder": Qwen3VLForConditionalGeneration,
}
MOST_PIXELS, LONGEST, SHORTEST = 4 * 1024 * 1024, 4096, 64
"""Of the canvas around an image that is the only one."""


def load(pretrained: str, parts: Sequence[str], dtype: torch.dtype, device: torch.device) -> Flux3Components:
    """The parts of a checkpoint; it need not have a scheduler, since there is only one."""
    needed = [part for part in parts if part != "scheduler"]
    folder = checkpoint_folder(pretrained, needed, optional=("scheduler",) if "scheduler" in parts else ())
    components = Flux3Components()
    for part in needed:
        if part == "tokenizer":
            components.tokenizer = require_template(load_other(AutoTokenizer, folder, part), folder / part)
        else:
            if part == "text_encoder":
                _require_layers(folder)
            setattr(components, part, load_part(_MODELS[part], folder, part, dtype, device))
    if "scheduler" in parts and (folder / "scheduler").is_dir():
        components.scheduler = load_other(FlowMatchEulerDiscreteScheduler, folder, "scheduler")
    elif "scheduler" in parts:
        components.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    return components


def _require_layers(folder: Path) -> None:
    """An error if a checkpoint's text encoder gives other text than its transformer takes."""
    encoder, transformer = (_description(folder / part) for part in ("text_encoder", "transformer"))
    text = encoder.get("text_config", {})
    offered, deepest = len(LAYERS) * text.get("hidden_size", 0), text.get("num_hidden_layers", 0)
    wanted = transformer.get("joint_attention_dim", offered)
    if deepest < LAYERS[-1] or offered != wanted:
        raise CheckpointError(
            f"{folder / 'text_encoder'} has {deepest} layers and gives {offered} channels; the transformer needs "
            f"{LAYERS[-1]} layers or more and {wanted} channels",
            "take text_encoder/ and tokenizer/ from the checkpoint that the transformer is of.",
        )


def _description(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        return {}
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} can't be read: {error}", "fetch it again.") from error


def velocity(transformer: Any, inputs: ModelInputs) -> Tensor:
    """`(N, C)` the transformer's prediction for targets, and zeros for controls."""
    dtype, device, shapes = transformer.dtype, inputs.images.device, inputs.shapes
    layout = Flux3Layout.build(
        inputs.text_lengths,
        [sample.target_tokens for sample in shapes],
        [sample.control_tokens for sample in shapes],
        device,
        padded=inputs.padded,
        uniform=len(set(inputs.text_lengths)) == 1 and len(set(shapes)) == 1 and not inputs.ragged,
    )
    targets, controls = layout.images.split(inputs.images.to(dtype))
    jump = None
    if transformer.config.flow_map:  # in training it goes nowhere: the velocity at the level itself
        jump = (inputs.sigma if inputs.onward is None else inputs.onward).to(dtype)
    predicted = transformer(
        hidden_states=targets,
        encoder_hidden_states=torch.cat([item.tokens for item in inputs.text]).to(dtype),
        timestep=inputs.sigma.to(dtype),
        img_ids=target_ids(shapes, device),
        txt_ids=text_ids(inputs.text_lengths, device),
        image_cond_hidden_states=controls,
        image_cond_ids=control_ids(shapes, device),
        target_timestep=jump,
        layout=layout,
        return_dict=False,
    )[0]
    return layout.images.join(predicted, torch.zeros_like(controls))


def lone_view(width: int, height: int) -> Transform:
    """An image that is the only one is kept whole: made smaller if need be, and mirrored up to whole tokens."""
    step = FACTS["flux3"].size_multiple
    scale = min(1.0, math.sqrt(MOST_PIXELS / (width * height)), LONGEST / max(width, height))
    while True:
        inner = max(1, round(height * scale)), max(1, round(width * scale))
        rows, columns = (min(LONGEST, max(SHORTEST, -(-side // step) * step)) for side in inner)
        if rows * columns <= MOST_PIXELS:
            return Transform((rows, columns), "mirror", step, inner)
        scale *= 0.995


def blocks(transformer: Any) -> list[nn.Module]:
    return [*transformer.mode_block_list, *transformer.single_transformer_blocks]


def arithmetic(transformer: Any) -> Arithmetic:
    """A token meets 4 width² weights of attention in a block and 3 r width² of a gated MLP, r times as wide.

    It goes through the blocks of its kind and through those of whole samples; pairs are counted in the latter, where
    nearly all of them are.
    """
    config = transformer.config
    width = config.num_attention_heads * config.attention_head_dim
    count = config.num_layers + config.num_single_layers
    return Arithmetic(
        per_token=2 * (4 + 3 * config.mlp_ratio) * width**2 * count, per_pair=4 * width * config.num_single_layers
    )


FLUX3 = Family(
    facts=FACTS["flux3"],
    text_parts=("text_encoder", "tokenizer"),
    image_parts=("vae",),
    tokenizer_parts=("tokenizer",),
    prompt_view=lambda index, size, transform: None,
    reference_view=reference_view,
    lone_view=lone_view,
    optional_parts=("scheduler",),
    tiny=tiny,
    transformer=Flux3Transformer2DModel,
    load=load,
    encoder=Flux3Encoder,
    text_counter=text_counter,
    velocity=velocity,
    combine=combine,
    blocks=blocks,
    widths=widths,
    arithmetic=arithmetic,
    noise_shift=NoiseShift.of,
    lora_prefix="transformer.",
    lora_alphas=False,
    original_names=original_names,
    swapped_names=SWAPPED,
    usage_note=(
        "diffusers' pipeline rewrites prompts before it encodes them (its prompt_upsampler step). This LoRA was "
        "trained on prompts as they are: leave that step out, or train on rewritten prompts."
    ),
)
FAMILIES = {FLUX3.name: FLUX3}
