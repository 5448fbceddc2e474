"""A Qwen-Image in miniature: the real classes, small sizes, random weights, a tokenizer built in code."""

from __future__ import annotations

import json

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qflux.models.qwen_image.components import QwenImageComponents
from qflux.models.qwen_image.prompts import DESCRIBE, EDIT, SPECIAL_TOKENS, PromptProcessor
from qflux.models.qwen_image.transformer import QwenImageTransformer2DModel

TEXT_WIDTH = 32


def tiny(seed: int = 0, sees_images: bool = True, zero_cond_t: bool = False) -> QwenImageComponents:
    """All components of the pipeline, in fp32 on the CPU; equal seeds give equal weights.

    With `zero_cond_t`, as in Qwen-Image-Edit-2511, controls are modulated as if they had no noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        words = tokenizer("system\n", "user\n", "assistant\n", DESCRIBE, EDIT, "Picture 1: ")
        # Smaller images than the real ones: a tiny model should not spend its time on 1,000 vision tokens.
        image_processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=112 * 112)
        return QwenImageComponents(
            transformer=_transformer(zero_cond_t),
            vae=_vae(),
            scheduler=_scheduler(),
            text_encoder=_text_encoder(words),
            tokenizer=words,
            processor=PromptProcessor(words, image_processor) if sees_images else None,
        )


def _transformer(zero_cond_t: bool) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    ).eval()


def _vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 1, 2, 2], num_res_blocks=1).eval()


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
    )


def _text_encoder(words: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = {token: words.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def tokenizer(*templates: str) -> Qwen2Tokenizer:
    """Byte-level BPE with merges learned from the templates, which so have as many tokens as in the original."""
    words = Tokenizer(BPE())
    words.pre_tokenizer = Sequence(
        [Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = BpeTrainer(
        vocab_size=4096, min_frequency=2, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    words.train_from_iterator(templates * 4, trainer)
    model = json.loads(words.to_str())["model"]
    vocabulary = model["vocab"] | {token: len(model["vocab"]) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in model["merges"]],
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
