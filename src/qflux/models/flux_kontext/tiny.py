"""A FLUX Kontext in miniature: the real classes, small sizes, random weights, tokenizers built in code."""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from qflux.models.flux_kontext.components import FluxKontextComponents
from qflux.models.flux_kontext.transformer import FluxTransformer2DModel

CLIP_LENGTH = 77


@dataclass(frozen=True)
class Sizes:
    """How small."""

    layers: tuple[int, int]
    """Double-stream and single-stream blocks."""
    heads: int
    head_axes: tuple[int, int, int]
    """Channels of a head for image number, row and column."""
    text: tuple[int, int, int]
    """T5: width, channels of a head, width of the MLP; it has four heads."""
    pooled: tuple[int, int, int]
    """CLIP: width, heads, width of the MLP."""
    vae: tuple[int, int, int, int]
    vae_groups: int
    vae_attention: bool
    words: tuple[str, ...] = ()
    """What T5 has a token of its own for; everything else is spelled."""


TINY = Sizes((2, 2), 4, (4, 6, 6), (32, 8, 48), (24, 2, 48), (8, 8, 16, 16), 4, vae_attention=True)


def tiny(seed: int = 0) -> FluxKontextComponents:
    """All components of the pipeline, in fp32 on the CPU; equal seeds give equal weights."""
    return small(TINY, seed)


def small(sizes: Sizes, seed: int) -> FluxKontextComponents:
    """The same in other sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = _clip_tokenizer(), _t5_tokenizer(sizes.words)
        return FluxKontextComponents(
            transformer=_transformer(sizes),
            vae=_vae(sizes),
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0, use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096
            ),
            text_encoder=_clip(sizes, tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=_t5(sizes, tokenizer_2),
            tokenizer_2=tokenizer_2,
        )


def _transformer(sizes: Sizes) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=sizes.layers[0],
        num_single_layers=sizes.layers[1],
        attention_head_dim=sum(sizes.head_axes),
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text[0],
        pooled_projection_dim=sizes.pooled[0],
        guidance_embeds=True,
        axes_dims_rope=sizes.head_axes,
    ).eval()


def _vae(sizes: Sizes) -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=sizes.vae,
        layers_per_block=1,
        norm_num_groups=sizes.vae_groups,
        latent_channels=16,
        sample_size=64,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=sizes.vae_attention,
    ).eval()


def _clip(sizes: Sizes, tokenizer: CLIPTokenizer) -> CLIPTextModel:
    width, heads, inner = sizes.pooled
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def _t5(sizes: Sizes, tokenizer: T5TokenizerFast) -> T5EncoderModel:
    width, head, inner = sizes.text
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=head,
        d_ff=inner,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config).eval()


def _clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE without merges: one token per byte."""
    letters = sorted(ByteLevel.alphabet())
    symbols = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_LENGTH)


def _t5_tokenizer(words: Iterable[str]) -> T5TokenizerFast:
    """A unigram model of some words and of single characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    pieces += [(f"▁{word}", -3.0) for word in words]
    pieces += [(character, -8.0) for character in string.printable if not character.isspace()]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)
