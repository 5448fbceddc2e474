"""A FLUX.2 in miniature: the real classes, small sizes, random weights, tokenizers built in code.

The text encoders have as many layers as FLUX.2 takes hidden states from, so those are few channels wide.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qflux.models.flux2.components import Flux2Components
from qflux.models.flux2.encoders import DEV, KLEIN
from qflux.models.flux2.transformer import Flux2Transformer2DModel

TEXT_WIDTH = 16
QWEN_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false -%}<think>\n\n</think>\n\n{%- endif -%}"
    "{%- endif -%}"
)
MISTRAL_TEMPLATE = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]"
    "{%- else -%}[INST]{{ message.content[0].text }}[/INST]{%- endif -%}{%- endfor -%}"
)
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MISTRAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]")


def tiny(seed: int = 0) -> Flux2Components:
    """klein: all components of its pipeline, in fp32 on the CPU; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = qwen_tokenizer()
        return _components(_qwen3(tokenizer), tokenizer, guidance_embeds=False)


def tiny_dev(seed: int = 0) -> Flux2Components:
    """dev, which reads prompts with another model and is told its guidance."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = _mistral_tokenizer()
        return _components(_mistral3(tokenizer), tokenizer, guidance_embeds=True)


def _components(text_encoder: Any, tokenizer: Any, guidance_embeds: bool) -> Flux2Components:
    return Flux2Components(
        transformer=Flux2Transformer2DModel(
            in_channels=128,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=3 * TEXT_WIDTH,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance_embeds,
        ).eval(),
        vae=vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096
        ),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


def vae() -> AutoencoderKLFlux2:
    model = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=32, sample_size=64
    ).eval()
    # Statistics as a trained batch norm has them; new ones are 0 and 1, and would hide that they are left out.
    model.bn.running_mean.normal_(std=0.3)
    model.bn.running_var.uniform_(0.5, 2.0)
    return model


def _qwen3(tokenizer: Any) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=24,
        num_hidden_layers=KLEIN.layers[-1] + 1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    return Qwen3ForCausalLM(config).eval()


def _mistral3(tokenizer: Any) -> Mistral3ForConditionalGeneration:
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 24,
            "num_hidden_layers": DEV.layers[-1] + 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 1024,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    return Mistral3ForConditionalGeneration(config).eval()


def _bytes(corpus: list[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE that knows these texts."""
    words = Tokenizer(BPE())
    words.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=size, min_frequency=2, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    words.train_from_iterator(corpus * 4, trainer)
    model = json.loads(words.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def qwen_tokenizer() -> Qwen2Tokenizer:
    vocabulary, merges = _bytes(["user\n", "assistant\n", "<think>\n\n</think>\n\n"], 512)
    vocabulary |= {token: len(vocabulary) + i for i, token in enumerate(_QWEN_TOKENS)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=list(_QWEN_TOKENS[1:]))
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def _mistral_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary, merges = _bytes([DEV.system or ""], 768)
    vocabulary |= {token: len(vocabulary) + i for i, token in enumerate(_MISTRAL_TOKENS)}
    words = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    words.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=list(_MISTRAL_TOKENS[4:]),
        padding_side="left",
    )
    tokenizer.chat_template = MISTRAL_TEMPLATE
    return tokenizer
