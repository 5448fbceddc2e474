"""A Qwen-Image-2.1 in miniature: the real classes, small sizes, random weights, a tokenizer built in code."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qflux.models.qwen_image.prompts import SPECIAL_TOKENS
from qflux.models.qwen_image.tiny import tokenizer
from qflux.models.qwen_image21.components import QwenImage21Components
from qflux.models.qwen_image21.prompts import SYSTEM, PromptProcessor
from qflux.models.qwen_image21.transformer import QwenImage21Transformer2DModel

TEXT_WIDTH = 32
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content[0].text }}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
)


def tiny(seed: int = 0) -> QwenImage21Components:
    """All components of the pipeline, in fp32 on the CPU; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        words = tokenizer("system\n", SYSTEM, "user\n", "assistant\n", "<image1> <image2>")
        words.chat_template = TEMPLATE
        images = Qwen2VLImageProcessorPil(
            patch_size=16, merge_size=2, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5]
        )
        return QwenImage21Components(
            transformer=_transformer(),
            vae=_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(
                base_image_seq_len=256, base_shift=0.5, max_image_seq_len=8192, max_shift=0.9, use_dynamic_shifting=True
            ),
            text_encoder=_text_encoder(words),
            processor=PromptProcessor(words, images),
        )


def _transformer() -> QwenImage21Transformer2DModel:
    model = QwenImage21Transformer2DModel(
        num_layers=3, attention_head_dim=16, num_attention_heads=4, context_in_dim=TEXT_WIDTH, axes_dims_rope=(4, 6, 6)
    )
    # As a trained model has it; a new one is 0, and would hide that it is left out.
    torch.nn.init.normal_(model.txt_in.text_norm.weight, std=0.3)
    return model.eval()


def _vae() -> AutoencoderKLQwenImage21:
    return AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, dim_mult=[1, 1, 2, 2, 2], num_res_blocks=1).eval()


def _text_encoder(words: Any) -> Qwen3VLForConditionalGeneration:
    ids = {token: words.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 16384,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen3VLForConditionalGeneration(config).eval()
