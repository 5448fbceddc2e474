"""A FLUX.3 in miniature: the real classes, small sizes, random weights, a tokenizer built in code.

The text encoder has as many layers as FLUX.3 takes hidden states from, so it is few channels wide.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from qflux.models.flux2.tiny import qwen_tokenizer, vae
from qflux.models.flux3.components import Flux3Components
from qflux.models.flux3.encoders import LAYERS
from qflux.models.flux3.transformer import Flux3Transformer2DModel

TEXT_WIDTH = 8
SHIFT = 6.93
"""Of its scheduler, whatever the size of the image."""


def tiny(seed: int = 0, flow_map: bool = False) -> Flux3Components:
    """All components, in fp32 on the CPU; equal seeds give equal weights. The distilled model is a `flow_map`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = qwen_tokenizer()
        return Flux3Components(
            transformer=_transformer(flow_map),
            vae=vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            text_encoder=_qwen3_vl(tokenizer),
            tokenizer=tokenizer,
        )


def _transformer(flow_map: bool) -> Flux3Transformer2DModel:
    return Flux3Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=len(LAYERS) * TEXT_WIDTH,
        timestep_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        flow_map=flow_map,
    ).eval()


def _qwen3_vl(tokenizer: Any) -> Qwen3VLForConditionalGeneration:
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 16,
            "num_hidden_layers": LAYERS[-1] + 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 16384,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **{f"{name}_token_id": len(tokenizer) - 1 for name in ("image", "video", "vision_start", "vision_end")},
    )
    return Qwen3VLForConditionalGeneration(config).eval()
