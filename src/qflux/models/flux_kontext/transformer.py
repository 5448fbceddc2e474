"""The FLUX transformer on ragged batches: diffusers' class, checkpoints and LoRA keys; a second way to run its blocks.

Shapes: B samples; L text, N image, T = L + N joint tokens of the whole batch; C channels (see `ragged.layout`).
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import diffusers
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

from qflux.models.by_ids import RaggedByIds, Tokens
from qflux.models.compat import picklable, register_blocks, require_plain_attention, take_mask
from qflux.models.mlp import gelu_beside, gelu_feed_forward
from qflux.ragged.attention import contiguous_gradient
from qflux.ragged.ending import ending_of
from qflux.ragged.heads import join_heads, join_turned_heads, turned_heads
from qflux.ragged.layout import RaggedLayout
from qflux.ragged.modulation import ModulatedStream, add_gated, clip_fp16, norm_modulate
from qflux.ragged.recomputed.unread import Unread
from qflux.ragged.rope import Rotary, rotary_from

_CONTROLNET = ("controlnet_block_samples", "controlnet_single_block_samples")


class RaggedFluxBlock(FluxTransformerBlock):
    """The double-stream block. With a layout it runs on concatenated tokens; without one it is diffusers' own."""

    unread: ClassVar = Unread(("ff.net.2", "ff_context.net.2"), gates=("norm1", "norm1_context"))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Rotary,
        joint_attention_kwargs: dict[str, Any] | None = None,
        layout: RaggedLayout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Ragged: image `(N, C)`, text `(L, C)`, temb `(B, C)`. Returns text, image, as diffusers does."""
        if layout is None:
            return super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        image = ModulatedStream(
            hidden_states,
            layout.image_sample,
            _conditioning(self.norm1, temb),
            (self.norm1.norm, self.norm2),
            functools.partial(gelu_feed_forward, self.ff),
        )
        text = ModulatedStream(
            encoder_hidden_states,
            layout.text_sample,
            _conditioning(self.norm1_context, temb),
            (self.norm1_context.norm, self.norm2_context),
            functools.partial(gelu_feed_forward, self.ff_context),
        )
        qkv = self._joint_qkv(text.before_attention(), image.before_attention(), image_rotary_emb, layout)
        attended = layout.attend(*qkv)
        text_out, image_out = layout.split(attended.flatten(1))
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


class SingleStreamAttention(FluxAttention):
    """diffusers' attention of a single-stream block, which concatenates its output: the gradient comes as a slice."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return contiguous_gradient(super().forward(*args, **options))


class RaggedFluxSingleBlock(FluxSingleTransformerBlock):
    """The single-stream block. With a layout it runs on the joint tokens; without one it is diffusers' own."""

    unread: ClassVar = Unread(("proj_out",), gates=("norm",))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Rotary,
        joint_attention_kwargs: dict[str, Any] | None = None,
        layout: RaggedLayout | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Ragged: joint tokens `(T, C)` in and out, temb `(B, C)`; there is no separate text stream any more.

        The last one returns targets `(M, C)`.
        """
        if layout is None:
            return super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        attn = self.attn
        conditioning = _conditioning(self.norm, temb)
        shift, scale, _ = conditioning.chunk(3, dim=-1)
        tokens = norm_modulate(self.norm.norm, hidden_states, scale, shift, layout.given.joint_sample)
        read = layout.read(tokens)
        # In this order, what one layer has rounded to 8 bits is what the next one reads.
        key, value, query = _heads(attn, attn.to_k(tokens), attn.to_v(tokens), attn.to_q(read))
        query = turned_heads(query, attn.norm_q, layout.read(image_rotary_emb))
        key = turned_heads(key, attn.norm_k, image_rotary_emb)
        attended = layout.attend(query, key, value).flatten(1)
        gate = conditioning.chunk(3, dim=-1)[2]  # behind attention, where compiled code begins anew
        out = gelu_beside(self.proj_mlp, self.proj_out, read, attended)
        return clip_fp16(add_gated(layout.read(hidden_states), gate, out, layout.joint_sample))


class FluxTransformer2DModel(RaggedByIds, diffusers.FluxTransformer2DModel):
    """diffusers' FLUX transformer that also takes samples of different sizes in one batch."""

    # A pipeline saves its parts by module and class. It computes the same with diffusers' own class, which everybody
    # can load, so that is the one to name.
    __module__ = diffusers.FluxTransformer2DModel.__module__
    _no_split_modules: ClassVar = ["RaggedFluxBlock", "RaggedFluxSingleBlock"]
    _repeated_blocks: ClassVar = ["RaggedFluxBlock", "RaggedFluxSingleBlock"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return picklable(super().__reduce_ex__(protocol), __name__)

    @functools.wraps(diffusers.FluxTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        register_blocks(RaggedFluxBlock, RaggedFluxSingleBlock)
        # The same modules under the same names, hence the same checkpoints; only `forward` gains a case.
        for block in self.transformer_blocks:
            block.__class__ = RaggedFluxBlock
        for block in self.single_transformer_blocks:
            block.__class__ = RaggedFluxSingleBlock
            block.attn.__class__ = SingleStreamAttention

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
        guidance: Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: Any = None,
        controlnet_single_block_samples: Any = None,
        return_dict: bool = True,
        controlnet_blocks_repeat: bool = False,
        attention_mask: Tensor | None = None,
        layout: RaggedLayout | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """diffusers' arguments, and two ways to pass samples that differ.

        Padded: `img_ids` may be `(S, 3)`, `(1, S, 3)` or `(B, S, 3)`, and `attention_mask` `(B, text + S)`, bool or
        0/1, says which tokens are valid. Padding is removed before anything is computed; its output rows are zero.

        Packed: with `layout`, `hidden_states` is `(N, in_channels)`, `encoder_hidden_states` `(L, text channels)`,
        `img_ids` `(N, 3)`, `txt_ids` `(L, 3)`, and the output `(N, out_channels)`. `pooled_projections`, `timestep` and
        `guidance` have one row per sample, as always.

        One sample, or samples of one shape with nothing masked, run diffusers' forward itself.
        """
        joint_attention_kwargs, attention_mask = take_mask(
            "joint_attention_kwargs", joint_attention_kwargs, attention_mask
        )
        conditions = {
            "pooled_projections": pooled_projections,
            "timestep": timestep,
            "guidance": guidance,
            "joint_attention_kwargs": joint_attention_kwargs,
            "controlnet_block_samples": controlnet_block_samples,
            "controlnet_single_block_samples": controlnet_single_block_samples,
            "controlnet_blocks_repeat": controlnet_blocks_repeat,
        }
        tokens = Tokens(hidden_states, encoder_hidden_states, img_ids, txt_ids)
        if layout is None:
            output = self.run_padded(tokens, attention_mask, conditions)
        else:
            output = self.run_packed(tokens, layout, conditions)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _stock(self, tokens: Tokens, conditions: dict[str, Any]) -> Tensor:
        image, text, img_ids, txt_ids = tokens
        return super().forward(image, text, img_ids=img_ids, txt_ids=txt_ids, **conditions, return_dict=False)[0]

    def _ragged(self, tokens: Tokens, layout: RaggedLayout, conditions: dict[str, Any]) -> Tensor:
        if any(conditions.pop(name) is not None for name in _CONTROLNET):
            raise ValueError(
                "ControlNet residuals are not supported for samples of different sizes: run them one by one."
            )
        require_plain_attention((*self.transformer_blocks, *self.single_transformer_blocks), FluxAttnProcessor)
        conditions.pop("controlnet_blocks_repeat")
        return self._forward_ragged(tokens, layout, **conditions)

    @apply_lora_scale("joint_attention_kwargs")
    def _forward_ragged(
        self,
        tokens: Tokens,
        layout: RaggedLayout,
        *,
        pooled_projections: Tensor,
        timestep: Tensor,
        guidance: Tensor | None,
        joint_attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        image = self.x_embedder(layout.enter_image(tokens.image))
        text = self.context_embedder(layout.enter_text(tokens.text))
        timestep = timestep.to(image.dtype) * 1000
        conditions = [timestep] if guidance is None else [timestep, guidance.to(image.dtype) * 1000]
        temb = self.time_text_embed(*conditions, pooled_projections)
        ids = layout.join(layout.enter_text(tokens.txt_ids), layout.enter_image(tokens.img_ids))
        rotary = rotary_from(*self.pos_embed(ids))

        checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        run = self._gradient_checkpointing_func if checkpointing else _call
        for block in self.transformer_blocks:
            text, image = run(block, image, text, temb, rotary, None, layout)
        joint = layout.join(text, image)
        blocks = self.single_transformer_blocks
        ending = ending_of(layout, blocks)
        for block in blocks:
            joint = run(block, joint, None, temb, rotary, None, ending if block is blocks[-1] else layout)

        image = ending.split(joint)[1]
        norm = self.norm_out
        scale, shift = norm.linear(norm.silu(temb).to(image.dtype)).chunk(2, dim=1)
        return ending.leave_image(self.proj_out(norm_modulate(norm.norm, image, scale, shift, ending.image_sample)))


def _conditioning(norm: Any, temb: Tensor) -> Tensor:
    return norm.linear(norm.silu(temb))


def _heads(attn: FluxAttention, *projections: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.unflatten(-1, (-1, attn.head_dim)) for x in projections)


def _call(block: torch.nn.Module, *args: Any) -> Any:
    return block(*args)
