"""The Qwen-Image-2.1 transformer on ragged batches: diffusers' class, checkpoints and LoRA keys; a second way to run.

One stream of text with images in it, targets last. Text and controls are modulated as if they had no noise, and see no
target: they are the same whatever the noise of the target is, and may stand before several of them.

Shapes: B samples, R targets, L text, N image, T = L + N joint tokens of the whole batch; C channels.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import diffusers
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21AttnProcessor,
    QwenImage21TransformerBlock,
)
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

from qflux.models.compat import picklable, require_plain_attention
from qflux.models.qwen_image21.layout import QwenImage21Layout, Segments
from qflux.models.qwen_image21.padded import QwenImage21Padding, is_ordinary
from qflux.ragged.ending import ending_of
from qflux.ragged.heads import turned_heads
from qflux.ragged.layout import RaggedLayout
from qflux.ragged.modulation import add_gated, clip_fp16, norm_modulate
from qflux.ragged.prefix import PrefixMemory
from qflux.ragged.recomputed.unread import Unread
from qflux.ragged.rope import Rotary


class RaggedQwenImage21Block(QwenImage21TransformerBlock):
    """The block. With a layout it runs on concatenated tokens; without one it is diffusers' own."""

    unread: ClassVar = Unread(("img_mlp.out",))

    def forward(
        self,
        hidden_states: Tensor,
        modulation: Tensor,
        rotary_emb: Tensor | None = None,
        attention_mask: Any = None,
        target_token_mask: Tensor | None = None,
        layer_cache: Any = None,
        kv_cache_mode: str | None = None,
        cache_write_slice: slice | None = None,
        segments: Any = None,
        key_valid: Tensor | None = None,
        row: Tensor | None = None,
        layout: RaggedLayout | None = None,
    ) -> Tensor:
        """Ragged: joint tokens `(T, C)`, modulation `(R + 1, 4 C)`, and `row` `(T,)`, which of its rows a token takes.

        The last one returns targets `(M, C)`. Without a layout it is diffusers' own.
        """
        if layout is None or row is None:
            return super().forward(
                hidden_states,
                modulation,
                rotary_emb,
                attention_mask,
                target_token_mask,
                layer_cache,
                kv_cache_mode,
                cache_write_slice,
                segments.ranges() if isinstance(segments, Segments) else segments,
                key_valid,
            )
        tokens = norm_modulate(self.img_norm1, hidden_states, modulation.chunk(4, dim=-1)[0], None, row)
        attended = self._attended(tokens, rotary_emb, layout)
        _, gate, scale_mlp, gate_mlp = modulation.chunk(4, dim=-1)  # behind attention, where compiled code begins anew
        row = layout.read(row)
        tokens = add_gated(layout.read(hidden_states), gate.tanh(), attended, row)
        modulated = norm_modulate(self.img_norm2, tokens, scale_mlp, None, row)
        return clip_fp16(add_gated(tokens, gate_mlp.tanh(), self.img_mlp(modulated), row))

    def _attended(self, tokens: Tensor, rotary: Any, layout: RaggedLayout) -> Tensor:
        attn = self.attn
        heads = (-1, attn.inner_dim // attn.heads)
        query = attn.to_q(layout.read(tokens)).unflatten(-1, heads)
        key, value = (project(tokens).unflatten(-1, heads) for project in (attn.to_k, attn.to_v))
        query = turned_heads(query, attn.norm_q, layout.read(rotary))
        key = turned_heads(key, attn.norm_k, rotary)
        return attn.to_out[1](attn.to_out[0](layout.attend(query, key, value).flatten(1)))


class QwenImage21Transformer2DModel(diffusers.QwenImage21Transformer2DModel):
    """diffusers' Qwen-Image-2.1 transformer that also takes samples of different sizes in one batch."""

    # A pipeline saves its parts by module and class: see FLUX's transformer.
    __module__ = diffusers.QwenImage21Transformer2DModel.__module__
    _no_split_modules: ClassVar = ["RaggedQwenImage21Block"]
    _repeated_blocks: ClassVar = ["RaggedQwenImage21Block"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return picklable(super().__reduce_ex__(protocol), __name__)

    @functools.wraps(diffusers.QwenImage21Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The same modules under the same names, hence the same checkpoints; only `forward` gains a case.
        for block in self.transformer_blocks:
            block.__class__ = RaggedQwenImage21Block

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_shapes: Any = None,
        img_mask: Any = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        kv_cache: Any = None,
        kv_cache_mode: str | None = None,
        return_dict: bool = True,
        attention_mask: Tensor | None = None,
        layout: QwenImage21Layout | None = None,
        memory: PrefixMemory | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """diffusers' arguments, and two ways to pass samples of different sizes, numbers of controls and of targets.

        Padded: `img_shapes` and `img_mask` may differ between samples, and `attention_mask` `(B, text + image)`, bool
        or 0/1, says which tokens are valid. The output is `(B, T, out_channels)`: the target of a sample is the end of
        its row, as it is in diffusers', and the rest is zero.

        Packed: with `layout`, `hidden_states` is `(N, in_channels)`, each sample's targets and then its controls;
        `encoder_hidden_states` `(L, text channels)`, without places for images; `timestep` `(R,)`, one for each target;
        and the output `(N, out_channels)`, of which the rows of targets mean something. With `memory`, which has to be
        of the same batch, only targets run once it has been filled.

        One sample, or samples of one arrangement with nothing masked, are computed exactly as diffusers does.
        """
        tokens = (hidden_states, encoder_hidden_states)
        if layout is None and is_ordinary(*tokens, img_shapes, img_mask, attention_mask):
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                timestep,
                img_shapes,
                img_mask,
                encoder_hidden_states_mask,
                attention_kwargs,
                kv_cache,
                kv_cache_mode,
                return_dict,
            )
        if kv_cache is not None:
            raise ValueError("kv_cache is not supported for samples of different sizes: run them one by one.")
        if not self.config.causal_condition:
            raise ValueError(
                "causal_condition is off in this checkpoint, and its text depends on the noise of its image; "
                "only models like the published Qwen-Image-2.1, which have it on, can be trained here."
            )
        if layout is not None:
            output = self._run_packed(*tokens, timestep, layout, memory, attention_kwargs=attention_kwargs)
        else:
            padding = QwenImage21Padding.of(
                *tokens, img_shapes, img_mask, text_mask=encoder_hidden_states_mask, mask=attention_mask
            )
            packed = (padding.image, padding.text, timestep, padding.layout, None)
            output = padding.unpack(self._run_packed(*packed, attention_kwargs=attention_kwargs))
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    @apply_lora_scale("attention_kwargs")
    def _run_packed(
        self,
        image: Tensor,
        text: Tensor,
        timestep: Tensor,
        layout: QwenImage21Layout,
        memory: PrefixMemory | None,
        *,
        attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        if layout.alike is not None and memory is None:
            return self._forward_alike(image, text, timestep, layout)
        unknown = sorted(set(attention_kwargs or {}) - {"scale"})
        if unknown:
            raise ValueError(f"attention_kwargs {unknown} are not supported for samples of different sizes.")
        require_plain_attention(self.transformer_blocks, QwenImage21AttnProcessor)
        if memory is not None and memory.blocks:
            return self._forward_targets(image, timestep, layout, memory)
        return self._forward_ragged(image, text, timestep, layout, memory)

    def _forward_alike(self, image: Tensor, text: Tensor, timestep: Tensor, layout: QwenImage21Layout) -> Tensor:
        """diffusers' forward, operation by operation, on samples of one arrangement.

        It finds the arrangement out from masks on the device, and waits for them several times. Here it is known.
        """
        alike, whole, batch = layout.alike, layout.joint, layout.joint.batch_size
        assert alike is not None
        targets, controls = (x.unflatten(0, (batch, len(x) // batch)) for x in layout.images.split(image))
        shown = self.img_in(torch.cat([controls, targets], dim=1))
        of_control, of_target = shown.split([controls.shape[1], targets.shape[1]], dim=1)
        images = layout.images.join(of_target.flatten(0, 1), of_control.flatten(0, 1))
        texts = self.txt_in(alike.with_slots(text)).flatten(0, 1).index_select(0, alike.text_rows)
        joint = whole.join(texts, images).unflatten(0, (batch, -1))

        temb = self.time_text_embed(torch.cat([timestep.to(joint.dtype), timestep.new_zeros(1).to(joint.dtype)]), joint)
        numbers = whole.join(*layout.positions)[: joint.shape[1]]
        rotary = torch.view_as_complex(self._rotary(numbers).squeeze(1))
        joint = self._blocks(joint, temb, rotary, None, alike.is_target, None, None, None, alike.segments)
        predicted = self.proj_out(self.norm_out(joint, temb, alike.is_target))
        return whole.split(predicted.flatten(0, 1))[1]

    def _forward_ragged(
        self, image: Tensor, text: Tensor, timestep: Tensor, layout: QwenImage21Layout, memory: PrefixMemory | None
    ) -> Tensor:
        whole, (of_text, of_image) = layout.joint, layout.positions
        joint = whole.join(self.txt_in(whole.enter_text(text)), self.img_in(whole.enter_image(image)))
        target = whole.enter_image(layout.target)
        row = whole.join(torch.full_like(whole.text_sample, layout.targets), target)
        temb = self._conditioning(timestep, joint)
        rotary = self._rotary(whole.join(whole.enter_text(of_text), whole.enter_image(of_image)))
        if memory is not None:
            joint = self._blocks(joint, temb, rotary, *[None] * 7, row, layout.recorded(memory))
            return whole.leave_image(self._predicted(whole.split(joint)[1], temb, target))
        ending = ending_of(whole, self.transformer_blocks)
        joint = self._blocks(joint, temb, rotary, *[None] * 7, row, whole, ending=ending)
        return ending.leave_image(self._predicted(ending.split(joint)[1], temb, ending.read_images(target)))

    def _forward_targets(
        self, image: Tensor, timestep: Tensor, layout: QwenImage21Layout, memory: PrefixMemory
    ) -> Tensor:
        """The same where the prefix has been through all blocks already."""
        noisy, controls = layout.images.split(image)
        row, _ = layout.images.split(layout.target)
        tokens = self.img_in(noisy)
        temb, rotary = self._conditioning(timestep, tokens), self._rotary(layout.images.split(layout.positions[1])[0])
        tokens = self._blocks(tokens, temb, rotary, *[None] * 7, row, layout.continued(memory))
        return layout.images.join(self._predicted(tokens, temb, row), torch.zeros_like(controls))

    def _conditioning(self, timestep: Tensor, like: Tensor) -> Tensor:
        """`(R + 1, C)` of the targets, and of what has no noise."""
        return self.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]).to(like.dtype), like)

    def _blocks(
        self, tokens: Tensor, temb: Tensor, rotary: Tensor, *rest: Any, ending: RaggedLayout | None = None
    ) -> Tensor:
        """All of them, the last one on a layout of its own if there is an ending."""
        table = self.modulation(temb)
        checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        run = self._gradient_checkpointing_func if checkpointing else _call
        for block in self.transformer_blocks:
            if ending is not None and block is self.transformer_blocks[-1]:
                rest = (*rest[:-1], ending)
            tokens = run(block, tokens, table, rotary, *rest)
        return tokens

    def _predicted(self, tokens: Tensor, temb: Tensor, row: Tensor) -> Tensor:
        norm = self.norm_out
        scale = norm.linear(norm.silu(temb).to(tokens.dtype))
        return self.proj_out(norm_modulate(norm.norm, tokens, scale, None, row))

    def _rotary(self, numbers: Tensor) -> Rotary:
        """From numbers of positions `(T, 3)`."""
        tables = self.pos_embed.freqs = [table.to(numbers.device) for table in self.pos_embed.freqs]
        turns = torch.cat([table[number] for table, number in zip(tables, numbers.unbind(1), strict=True)], dim=-1)
        return torch.view_as_real(turns)[:, None]


def _call(block: torch.nn.Module, *args: Any) -> Any:
    return block(*args)
