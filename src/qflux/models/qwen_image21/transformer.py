"""The Qwen-Image-2.1 transformer on ragged batches: diffusers' class, checkpoints and LoRA keys; a second way to run.

One stream of text with images in it, targets last. Text and controls are modulated as if they had no noise, and see no
target: they are the same whatever the noise of the target is, and may stand before several of them.

Shapes: B samples, R targets, L text, N image, T = L + N joint tokens of the whole batch; C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
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
from qflux.models.qwen_image21.arrangement import arrange, positions
from qflux.ragged.heads import turned_heads
from qflux.ragged.interleave import Interleave
from qflux.ragged.layout import PackedLayout, PaddedLayout, RaggedLayout
from qflux.ragged.modulation import add_gated, clip_fp16, norm_modulate
from qflux.ragged.prefix import Continued, PrefixMemory, Recorded
from qflux.ragged.rope import Rotary
from qflux.ragged.shapes import Shapes, image_tokens
from qflux.ragged.transfer import upload


@dataclass(frozen=True)
class QwenImage21Layout:
    """Where the tokens of a batch lie, where they stand in their samples, and how noisy they are."""

    joint: RaggedLayout
    positions: tuple[Tensor, Tensor]
    """Of text `(L, 3)` and image tokens `(N, 3)`: numbers in the tables of rotary positions."""
    target: Tensor
    """`(N,)` which target an image token is of; R if it is of a control."""
    targets: int
    """R, of the whole batch."""
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    """Tokens of each sample before its targets, and of its targets."""
    images: Interleave
    """Targets and controls, as two streams and as the images of each sample."""

    @classmethod
    def build(
        cls,
        text: Sequence[int],
        shapes: Sequence[Shapes],
        places: Sequence[Sequence[int]],
        device: torch.device | str | None = None,
        padded: bool = False,
    ) -> QwenImage21Layout:
        """From the text tokens and images of each sample, and the text tokens before each control."""
        samples = list(zip(text, shapes, places, strict=True))
        packed = PackedLayout.build(
            text, [sample.tokens for sample in shapes], device, arrangements=[arrange(*sample) for sample in samples]
        )
        of_text, of_image = zip(*(positions(*sample) for sample in samples), strict=True)
        count, rows = sum(len(sample.targets) for sample in shapes), list[Tensor]()
        numbers = iter(range(count))
        for sample in shapes:
            rows += [torch.full((image_tokens([shape]),), next(numbers)) for shape in sample.targets]
            rows.append(torch.full((sample.control_tokens,), count))
        return cls(
            joint=PaddedLayout.of(packed) if padded else packed,
            positions=(upload(torch.cat(of_text), device), upload(torch.cat(of_image), device)),
            target=upload(torch.cat(rows), device),
            targets=count,
            lengths=(
                tuple(length + sample.control_tokens for length, sample in zip(text, shapes, strict=True)),
                tuple(sample.target_tokens for sample in shapes),
            ),
            images=Interleave.build(
                [sample.target_tokens for sample in shapes], [sample.control_tokens for sample in shapes], device
            ),
        )

    def recorded(self, memory: PrefixMemory) -> Recorded:
        """The joint layout, which keeps the prefix of each block."""
        prefixes, targets = self.lengths
        kinds = torch.tensor([True, False]).repeat(len(targets))
        counts = torch.tensor([length for pair in zip(prefixes, targets, strict=True) for length in pair])
        rows = kinds.repeat_interleave(counts).nonzero().squeeze(1)
        return Recorded(self.joint, upload(rows, self.target.device), memory)

    def continued(self, memory: PrefixMemory) -> Continued:
        """A layout of targets alone, behind the prefix that was kept."""
        if self.targets != len(self.lengths[1]):
            raise ValueError("several targets of a sample would see each other: with a memory it has one.")
        return Continued(memory, *self.lengths, self.target.device)


class RaggedQwenImage21Block(QwenImage21TransformerBlock):
    """The block. With a layout it runs on concatenated tokens; without one it is diffusers' own."""

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

        Without a layout it is diffusers' own.
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
                segments,
                key_valid,
            )
        tokens = norm_modulate(self.img_norm1, hidden_states, modulation.chunk(4, dim=-1)[0], None, row)
        attended = self._attended(tokens, rotary_emb, layout)
        _, gate, scale_mlp, gate_mlp = modulation.chunk(4, dim=-1)  # behind attention, where compiled code begins anew
        tokens = add_gated(hidden_states, gate.tanh(), attended, row)
        modulated = norm_modulate(self.img_norm2, tokens, scale_mlp, None, row)
        return clip_fp16(add_gated(tokens, gate_mlp.tanh(), self.img_mlp(modulated), row))

    def _attended(self, tokens: Tensor, rotary: Any, layout: RaggedLayout) -> Tensor:
        attn = self.attn
        heads = (-1, attn.inner_dim // attn.heads)
        query, key, value = (project(tokens).unflatten(-1, heads) for project in (attn.to_q, attn.to_k, attn.to_v))
        query, key = turned_heads(query, attn.norm_q, rotary), turned_heads(key, attn.norm_k, rotary)
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
        img_shapes: list[list[tuple[int, int, int]]] | None = None,
        img_mask: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        kv_cache: Any = None,
        kv_cache_mode: str | None = None,
        return_dict: bool = True,
        layout: QwenImage21Layout | None = None,
        memory: PrefixMemory | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """diffusers' arguments, and samples of different sizes, numbers of controls and of targets.

        With `layout`, `hidden_states` is `(N, in_channels)`, each sample's targets and then its controls;
        `encoder_hidden_states` `(L, text channels)`, without places for images; `timestep` `(R,)`, one for each target;
        and the output `(N, out_channels)`, of which the rows of targets mean something. With `memory`, which has to be
        of the same batch, only targets run once it has been filled.
        """
        if layout is None:
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
        require_plain_attention(self.transformer_blocks, QwenImage21AttnProcessor)
        run = self._forward_targets if memory is not None and memory.blocks else self._forward_ragged
        output = run(hidden_states, encoder_hidden_states, timestep, layout, memory, attention_kwargs=attention_kwargs)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    @apply_lora_scale("attention_kwargs")
    def _forward_ragged(
        self,
        image: Tensor,
        text: Tensor,
        timestep: Tensor,
        layout: QwenImage21Layout,
        memory: PrefixMemory | None,
        *,
        attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        whole, (of_text, of_image) = layout.joint, layout.positions
        joint = whole.join(self.txt_in(whole.enter_text(text)), self.img_in(whole.enter_image(image)))
        target = whole.enter_image(layout.target)
        row = whole.join(torch.full_like(whole.text_sample, layout.targets), target)
        temb = self._conditioning(timestep, joint)
        rotary = self._rotary(whole.join(whole.enter_text(of_text), whole.enter_image(of_image)))
        seen = whole if memory is None else layout.recorded(memory)
        joint = self._blocks(joint, temb, rotary, row, seen)
        return whole.leave_image(self._predicted(whole.split(joint)[1], temb, target))

    @apply_lora_scale("attention_kwargs")
    def _forward_targets(
        self,
        image: Tensor,
        text: Tensor,
        timestep: Tensor,
        layout: QwenImage21Layout,
        memory: PrefixMemory,
        *,
        attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        """The same where the prefix has been through all blocks already."""
        noisy, controls = layout.images.split(image)
        row, _ = layout.images.split(layout.target)
        tokens = self.img_in(noisy)
        temb, rotary = self._conditioning(timestep, tokens), self._rotary(layout.images.split(layout.positions[1])[0])
        tokens = self._blocks(tokens, temb, rotary, row, layout.continued(memory))
        return layout.images.join(self._predicted(tokens, temb, row), torch.zeros_like(controls))

    def _conditioning(self, timestep: Tensor, like: Tensor) -> Tensor:
        """`(R + 1, C)` of the targets, and of what has no noise."""
        return self.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]).to(like.dtype), like)

    def _blocks(self, tokens: Tensor, temb: Tensor, rotary: Rotary, row: Tensor, layout: Any) -> Tensor:
        table = self.modulation(temb)
        checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        run = self._gradient_checkpointing_func if checkpointing else _call
        for block in self.transformer_blocks:
            tokens = run(block, tokens, table, rotary, *[None] * 7, row, layout)
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
