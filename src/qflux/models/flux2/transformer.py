"""The FLUX.2 transformer on ragged batches: diffusers' class, checkpoints and LoRA keys; a second way to run blocks.

One modulation table serves all blocks of a kind, so it is made once per step and handed to each of them.

Shapes: B samples; L text, N image, T = L + N joint tokens of the whole batch; C channels (see `ragged.layout`).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, ClassVar

import diffusers
import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2AttnProcessor,
    Flux2ParallelSelfAttnProcessor,
    Flux2SingleTransformerBlock,
    Flux2Transformer2DModelOutput,
    Flux2TransformerBlock,
)
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from qflux.models.by_ids import RaggedByIds, Tokens
from qflux.models.compat import picklable, register_blocks, require_plain_attention, take_mask
from qflux.models.mlp import linear_of_two
from qflux.models.projection import TextProjection
from qflux.ragged.attention import WITHOUT_CUDNN, needs_contiguous_gradient
from qflux.ragged.ending import ending_of
from qflux.ragged.heads import join_heads, join_turned_heads, turned_heads
from qflux.ragged.layout import RaggedLayout
from qflux.ragged.modulation import ModulatedStream, add_gated, clip_fp16, norm_modulate
from qflux.ragged.recomputed.unread import Unread
from qflux.ragged.rope import Rotary, rotary_from


class RaggedFlux2Block(Flux2TransformerBlock):
    """The double-stream block. With a layout it runs on concatenated tokens; without one it is diffusers' own."""

    unread: ClassVar = Unread(("ff.linear_out", "ff_context.linear_out"))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb_mod_img: Tensor,
        temb_mod_txt: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        layout: RaggedLayout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Ragged: image `(N, C)`, text `(L, C)`, modulation `(B, 6 C)`. Returns text, image, as diffusers does."""
        if layout is None:
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                temb_mod_img,
                temb_mod_txt,
                image_rotary_emb,
                joint_attention_kwargs,
            )
        image = ModulatedStream(hidden_states, layout.image_sample, temb_mod_img, (self.norm1, self.norm2), self.ff)
        text = ModulatedStream(
            encoder_hidden_states,
            layout.text_sample,
            temb_mod_txt,
            (self.norm1_context, self.norm2_context),
            self.ff_context,
        )
        qkv = self._joint_qkv(text.before_attention(), image.before_attention(), image_rotary_emb, layout)
        text_out, image_out = layout.split(layout.attend(*qkv).flatten(1))
        text_out, image_out = self.attn.to_add_out(text_out), self.attn.to_out[1](self.attn.to_out[0](image_out))
        return clip_fp16(text.after_attention(text_out)), image.after_attention(image_out)

    def _joint_qkv(
        self, text: Tensor, image: Tensor, rotary: Rotary, layout: RaggedLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        attn = self.attn
        text_q, text_k, text_v = _heads(attn, attn.add_q_proj(text), attn.add_k_proj(text), attn.add_v_proj(text))
        image_q, image_k, image_v = _heads(attn, attn.to_q(image), attn.to_k(image), attn.to_v(image))
        query = join_turned_heads(layout, text_q, image_q, (attn.norm_added_q, attn.norm_q), rotary)
        key = join_turned_heads(layout, text_k, image_k, (attn.norm_added_k, attn.norm_k), rotary)
        return query, key, join_heads(layout, text_v, image_v)


class RaggedFlux2SingleBlock(Flux2SingleTransformerBlock):
    """The single-stream block: one projection for query, key, value and the MLP, and one back."""

    unread: ClassVar = Unread(("attn.to_out",))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        temb_mod: Tensor,
        image_rotary_emb: Any = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        split_hidden_states: bool = False,
        text_seq_len: int | None = None,
        layout: RaggedLayout | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Ragged: joint tokens `(T, C)` in and out, modulation `(B, 3 C)`; the last one returns targets `(M, C)`.

        Without a layout it is diffusers' own.
        """
        if layout is None:
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                temb_mod,
                image_rotary_emb,
                joint_attention_kwargs,
                split_hidden_states,
                text_seq_len,
            )
        attn = self.attn
        shift, scale, _ = temb_mod.chunk(3, dim=-1)
        tokens = norm_modulate(self.norm, hidden_states, scale, shift, layout.given.joint_sample)
        *qkv, mlp = attn.to_qkv_mlp_proj(tokens).split([*[attn.inner_dim] * 3, 2 * attn.mlp_hidden_dim], dim=-1)
        # Before attention, where compiled code breaks off: a slice across the break would be read far more slowly.
        mlp = attn.mlp_act_fn(layout.read(mlp))
        query, key, value = _heads(attn, *qkv)
        query = turned_heads(layout.read(query), attn.norm_q, layout.read(image_rotary_emb))
        key = turned_heads(key, attn.norm_k, image_rotary_emb)
        attended = layout.attend(query, key, value).flatten(1)
        gate = temb_mod.chunk(3, dim=-1)[2]  # behind attention, where compiled code begins anew
        out = linear_of_two(attn.to_out, attended, mlp)
        return clip_fp16(add_gated(layout.read(hidden_states), gate, out, layout.joint_sample))


class Flux2Transformer2DModel(RaggedByIds, diffusers.Flux2Transformer2DModel):
    """diffusers' FLUX.2 transformer that also takes samples of different sizes in one batch."""

    # A pipeline saves its parts by module and class. It computes the same with diffusers' own class, which everybody
    # can load, so that is the one to name.
    __module__ = diffusers.Flux2Transformer2DModel.__module__
    _no_split_modules: ClassVar = ["RaggedFlux2Block", "RaggedFlux2SingleBlock"]
    _repeated_blocks: ClassVar = ["RaggedFlux2Block", "RaggedFlux2SingleBlock"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return picklable(super().__reduce_ex__(protocol), __name__)

    @functools.wraps(diffusers.Flux2Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        register_blocks(RaggedFlux2Block, RaggedFlux2SingleBlock)
        # The same modules under the same names, hence the same checkpoints; only `forward` gains a case.
        for block in self.transformer_blocks:
            block.__class__ = RaggedFlux2Block
        for block in self.single_transformer_blocks:
            block.__class__ = RaggedFlux2SingleBlock
        self.context_embedder.__class__ = TextProjection

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
        guidance: Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        kv_cache: Any = None,
        kv_cache_mode: str | None = None,
        num_ref_tokens: int = 0,
        ref_fixed_timestep: float = 0.0,
        attention_mask: Tensor | None = None,
        layout: RaggedLayout | None = None,
    ) -> Flux2Transformer2DModelOutput | tuple[Any, ...]:
        """diffusers' arguments, and two ways to pass samples that differ.

        Padded: `img_ids` may be `(S, 4)`, `(1, S, 4)` or `(B, S, 4)`, and `attention_mask` `(B, text + S)`, bool or
        0/1, says which tokens are valid. Padding is removed before anything is computed; its output rows are zero.

        Packed: with `layout`, `hidden_states` is `(N, in_channels)`, `encoder_hidden_states` `(L, text channels)`,
        `img_ids` `(N, 4)`, `txt_ids` `(L, 4)`, and the output `(N, out_channels)`. `timestep` and `guidance` have one
        row per sample, as always.

        One sample, or samples of one shape with nothing masked, run diffusers' forward itself; packed ones with a
        gradient on a GPU do not (`_may_run_stock`).
        """
        joint_attention_kwargs, attention_mask = take_mask(
            "joint_attention_kwargs", joint_attention_kwargs, attention_mask
        )
        conditions = {"timestep": timestep, "guidance": guidance, "joint_attention_kwargs": joint_attention_kwargs}
        if kv_cache_mode is not None:
            if layout is not None or attention_mask is not None:
                raise ValueError("kv_cache_mode is not supported for samples of different sizes: run them one by one.")
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                img_ids=img_ids,
                txt_ids=txt_ids,
                **conditions,
                return_dict=return_dict,
                kv_cache=kv_cache,
                kv_cache_mode=kv_cache_mode,
                num_ref_tokens=num_ref_tokens,
                ref_fixed_timestep=ref_fixed_timestep,
            )
        tokens = Tokens(hidden_states, encoder_hidden_states, img_ids, txt_ids)
        if layout is None:
            output = self.run_padded(tokens, attention_mask, conditions)
        else:
            output = self.run_packed(tokens, layout, conditions)
        return Flux2Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _stock(self, tokens: Tokens, conditions: dict[str, Any]) -> Tensor:
        image, text, img_ids, txt_ids = tokens
        with nullcontext() if self._may_run_stock(image) else sdpa_kernel(WITHOUT_CUDNN):
            return super().forward(image, text, img_ids=img_ids, txt_ids=txt_ids, **conditions, return_dict=False)[0]

    def _may_run_stock(self, image: Tensor) -> bool:
        # diffusers' single-stream block joins what attention gave with the MLP: its gradient comes as a slice.
        return not needs_contiguous_gradient(image)

    def _ragged(self, tokens: Tokens, layout: RaggedLayout, conditions: dict[str, Any]) -> Tensor:
        require_plain_attention(self.transformer_blocks, Flux2AttnProcessor)
        require_plain_attention(self.single_transformer_blocks, Flux2ParallelSelfAttnProcessor)
        return self._forward_ragged(tokens, layout, **conditions)

    @apply_lora_scale("joint_attention_kwargs")
    def _forward_ragged(
        self,
        tokens: Tokens,
        layout: RaggedLayout,
        *,
        timestep: Tensor,
        guidance: Tensor | None,
        joint_attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        image = self.x_embedder(layout.enter_image(tokens.image))
        text = self.context_embedder(layout.enter_text(tokens.text))
        levels = [None if level is None else level.to(image.dtype) * 1000 for level in (timestep, guidance)]
        temb = self.time_guidance_embed(*levels)
        of_image, of_text = self.double_stream_modulation_img(temb), self.double_stream_modulation_txt(temb)
        of_joint = self.single_stream_modulation(temb)
        ids = layout.join(layout.enter_text(tokens.txt_ids), layout.enter_image(tokens.img_ids))
        rotary = rotary_from(*self.pos_embed(ids))

        checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        run = self._gradient_checkpointing_func if checkpointing else _call
        for block in self.transformer_blocks:
            text, image = run(block, image, text, of_image, of_text, rotary, None, layout)
        joint = layout.join(text, image)
        blocks = self.single_transformer_blocks
        ending = ending_of(layout, blocks)
        for block in blocks:
            at = ending if block is blocks[-1] else layout
            joint = run(block, joint, None, of_joint, rotary, None, False, None, at)

        image = ending.split(joint)[1]
        norm = self.norm_out
        scale, shift = norm.linear(norm.silu(temb).to(image.dtype)).chunk(2, dim=1)
        return ending.leave_image(self.proj_out(norm_modulate(norm.norm, image, scale, shift, ending.image_sample)))


def _heads(attn: Any, *projections: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.unflatten(-1, (-1, attn.head_dim)) for x in projections)


def _call(block: torch.nn.Module, *args: Any) -> Any:
    return block(*args)
