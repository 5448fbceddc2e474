"""The demo's base model: a FLUX Kontext of 9 million weights that knows the instructions of `instructions`.

`scripts/train_demo_base.py` trains it; the result lies beside this file, in half precision.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from qflux.demo.instructions import words
from qflux.models.flux_kontext.components import FluxKontextComponents
from qflux.models.flux_kontext.transformer import FluxTransformer2DModel

FOLDER = Path(__file__).with_name("model")
TEXT_TOKENS = 24
"""The length every prompt is padded to, as FLUX does."""
CLIP_LENGTH = 77
TEXT_WIDTH, POOLED_WIDTH = 128, 96


def untrained(seed: int) -> FluxKontextComponents:
    """All components in float32 on the CPU; equal seeds give equal weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = _clip_tokenizer(), _t5_tokenizer()
        return FluxKontextComponents(
            transformer=_transformer(),
            vae=_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0, use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096
            ),
            text_encoder=_clip(tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=_t5(tokenizer_2),
            tokenizer_2=tokenizer_2,
        )


def _transformer() -> FluxTransformer2DModel:
    model = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=7,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 14, 14),
    )
    # Blocks start as the identity, and the output as zero: deep transformers of this kind train faster so.
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (".norm" in name or name in ("norm_out.linear", "proj_out")):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    return model


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(24, 48, 72, 96),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=16,
        sample_size=128,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _clip(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=POOLED_WIDTH,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def _t5(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def _clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE without merges: one token per byte."""
    letters = sorted(ByteLevel.alphabet())
    symbols = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_LENGTH)


def _t5_tokenizer() -> T5TokenizerFast:
    """The words of the instructions, and single characters for all others."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [(f"▁{word}", -3.0) for word in words()]
    pieces += [(character, -8.0) for character in string.printable if not character.isspace()]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)
