"""A FLUX Kontext in miniature: the real classes, small sizes, random weights, tokenizers built in code."""

from __future__ import annotations

import string

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from qflux.models.flux_kontext.components import FluxKontextComponents
from qflux.models.flux_kontext.transformer import FluxTransformer2DModel

TEXT_WIDTH = 32
POOLED_WIDTH = 24
CLIP_LENGTH = 77


def tiny(seed: int = 0) -> FluxKontextComponents:
    """All components of the pipeline, in fp32 on the CPU; equal seeds give equal weights."""
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
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=16,
        sample_size=64,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


def _clip(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=POOLED_WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def _t5(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config).eval()


def _clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE without merges: one token per byte."""
    letters = sorted(ByteLevel.alphabet())
    symbols = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_LENGTH)


def _t5_tokenizer() -> T5TokenizerFast:
    """A unigram model of single characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(character, -4.0) for character in string.printable if not character.isspace()]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)
