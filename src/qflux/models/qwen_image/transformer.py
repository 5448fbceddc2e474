"""The Qwen-Image transformer on ragged batches: diffusers' class, checkpoints and LoRA keys.

Shapes: B samples; L text, N image, T = L + N joint tokens of the whole batch; P, S text and image tokens of a padded
sample; C channels, D channels of a head (see `ragged.layout`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import diffusers
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformerBlock,
)
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor

from qflux.models.compat import mask_from_lengths, picklable, register_blocks, require_plain_attention, take_mask
from qflux.models.mlp import gelu_feed_forward
from qflux.models.padding import Padding, as_bool
from qflux.models.qwen_image.facts import MOST_IMAGES
from qflux.ragged.ending import ending_of
from qflux.ragged.heads import join_heads, join_turned_heads
from qflux.ragged.layout import PackedLayout, RaggedLayout
from qflux.ragged.modulation import ModulatedStream, clip_fp16, norm_modulate
from qflux.ragged.recomputed.unread import Unread
from qflux.ragged.rope import Rotary
from qflux.ragged.shapes import ImageShape, image_tokens
from qflux.ragged.transfer import upload

ImgShapes = Sequence[Sequence[ImageShape]]

POSITIONS = MOST_IMAGES


class RaggedQwenImageBlock(QwenImageTransformerBlock):
    """The double-stream block. With a layout it runs on concatenated tokens; without one it is diffusers' own."""

    unread: ClassVar = Unread(("img_mlp.net.2", "txt_mlp.net.2"), gates=("img_mod", "txt_mod"))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Any,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: Tensor | None = None,
        layout: RaggedLayout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Ragged: image `(N, C)`, text `(L, C)`, temb `(B, C)`. Returns text, image, as diffusers does; the last block
        returns no text, and targets `(M, C)`.

        With `zero_cond_t`, temb is `(2 B, C)`, its second half for t = 0, and `modulate_index` `(N,)` says which row of
        temb an image token takes.
        """
        if layout is None:
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                temb,
                image_rotary_emb,
                joint_attention_kwargs,
                modulate_index,
            )
        of_image = layout.given.image_sample if modulate_index is None else modulate_index
        text_temb = temb if modulate_index is None else temb.chunk(2)[0]
        image = ModulatedStream(
            hidden_states,
            of_image,
            self.img_mod(temb),
            (self.img_norm1, self.img_norm2),
            functools.partial(gelu_feed_forward, self.img_mlp),
        )
        text = ModulatedStream(
            encoder_hidden_states,
            layout.given.text_sample,
            self.txt_mod(text_temb),
            (self.txt_norm1, self.txt_norm2),
            functools.partial(gelu_feed_forward, self.txt_mlp),
        )
        qkv = self._joint_qkv(text.before_attention(), image.before_attention(), image_rotary_emb, layout)
        text_out, image_out = layout.split(layout.attend(*qkv).flatten(1))
        text_out, image_out = self.attn.to_add_out(text_out), self.attn.to_out[1](self.attn.to_out[0](image_out))
        text, image = text.of(layout.read_text), image.of(layout.read_images)
        return clip_fp16(text.after_attention(text_out)), clip_fp16(image.after_attention(image_out))

    def _joint_qkv(
        self, text: Tensor, image: Tensor, rotary: Rotary, layout: RaggedLayout
    ) -> tuple[Tensor, Tensor, Tensor]:
        attn, given = self.attn, layout.given
        heads = (-1, attn.inner_dim // attn.heads)
        # Stream by stream: what one layer has rounded to 8 bits is what the next one reads.
        text_k, text_v = (project(text).unflatten(-1, heads) for project in (attn.add_k_proj, attn.add_v_proj))
        text_q = attn.add_q_proj(layout.read_text(text)).unflatten(-1, heads)
        image_k, image_v = (project(image).unflatten(-1, heads) for project in (attn.to_k, attn.to_v))
        image_q = attn.to_q(layout.read_images(image)).unflatten(-1, heads)
        query = join_turned_heads(layout, text_q, image_q, (attn.norm_added_q, attn.norm_q), layout.read(rotary))
        key = join_turned_heads(given, text_k, image_k, (attn.norm_added_k, attn.norm_k), rotary)
        return query, key, join_heads(given, text_v, image_v)


class QwenImageTransformer2DModel(diffusers.QwenImageTransformer2DModel):
    """diffusers' Qwen-Image transformer that also takes samples of different sizes and image counts in one batch."""

    # A pipeline saves its parts by module and class: see FLUX's transformer.
    __module__ = diffusers.QwenImageTransformer2DModel.__module__
    _no_split_modules: ClassVar = ["RaggedQwenImageBlock"]
    _repeated_blocks: ClassVar = ["RaggedQwenImageBlock"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return picklable(super().__reduce_ex__(protocol), __name__)

    @functools.wraps(diffusers.QwenImageTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        register_blocks(RaggedQwenImageBlock)
        # The same modules under the same names, hence the same checkpoints; only `forward` gains a case.
        for block in self.transformer_blocks:
            block.__class__ = RaggedQwenImageBlock

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        timestep: Tensor = None,  # type: ignore[assignment]
        img_shapes: ImgShapes | None = None,
        guidance: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: Any = None,
        additional_t_cond: Tensor | None = None,
        return_dict: bool = True,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        layout: RaggedLayout | None = None,
        txt_seq_lens: Sequence[int] | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """diffusers' arguments, and two ways to pass samples that differ.

        Padded: `img_shapes` may differ per sample, in sizes and in number; image tokens beyond a sample's own are
        padding. Shapes of fewer samples, one entry per prompt, are each repeated for the images of their prompt.
        `encoder_hidden_states_mask` `(B, P)` gives each sample its own text. `attention_mask` `(B, P + S)`, bool or
        0/1, may say both instead. Padding is removed before anything is computed; its output rows are zero.
        `image_rotary_emb` may hold precomputed positions: complex image `(B, S, D / 2)` and text `(B, P, D / 2)`.

        Packed: with `layout`, `hidden_states` is `(N, in_channels)`, `encoder_hidden_states` `(L, text channels)`, and
        the output `(N, out_channels)`; `img_shapes` is still per sample.

        One sample, or samples of one shape with nothing masked, run diffusers' forward itself.
        """
        attention_kwargs, attention_mask = take_mask("attention_kwargs", attention_kwargs, attention_mask)
        conditions = {
            "timestep": timestep,
            "guidance": guidance,
            "attention_kwargs": attention_kwargs,
            "controlnet_block_samples": controlnet_block_samples,
            "additional_t_cond": additional_t_cond,
        }
        if layout is not None:
            shapes = _as_lists(img_shapes, layout.batch_size)
            output = self._forward_packed(
                hidden_states, encoder_hidden_states, shapes, image_rotary_emb, layout, conditions
            )
        else:
            text_mask = mask_from_lengths(txt_seq_lens, encoder_hidden_states, encoder_hidden_states_mask)
            masks = (text_mask, attention_mask)
            output = self._forward_padded(
                hidden_states, encoder_hidden_states, img_shapes, masks, image_rotary_emb, conditions
            )
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _forward_padded(
        self,
        image: Tensor,
        text: Tensor,
        img_shapes: ImgShapes | None,
        masks: tuple[Tensor | None, Tensor | None],
        turns: tuple[Tensor, Tensor] | None,
        conditions: dict[str, Any],
    ) -> Tensor:
        """diffusers' convention: an ordinary batch as it is, anything else packed, run, and put back into zeros."""
        shapes = _as_lists(img_shapes, len(image))
        alike = shapes is not None and all(sample == shapes[0] for sample in shapes)
        fits = shapes is not None and image_tokens(shapes[0]) == image.shape[1]
        if (
            alike
            and fits
            and turns is None
            and masks[1] is None
            and (masks[0] is None or torch.compiler.is_compiling())
        ):
            # Decided without a look at any value, so that this call can be compiled and exported whole.
            return super().forward(image, text, masks[0], img_shapes=shapes, **conditions, return_dict=False)[0]
        padding = _padding(text, image, *masks, shapes)
        if padding.is_empty and turns is None and alike:
            return super().forward(image, text, masks[0], img_shapes=shapes, **conditions, return_dict=False)[0]
        places = [row.nonzero().squeeze(1) for row in padding.text]
        whole = all(len(place) == 0 or int(place[-1]) == len(place) - 1 for place in places)
        layout = PackedLayout.build(
            padding.text_lengths,
            padding.image_lengths,
            image.device,
            uniform=alike and whole and turns is None and len(set(padding.text_lengths)) == 1,
        )
        if turns is not None:
            turns = _pack_rotary(turns, padding)
        elif not layout.uniform:
            turns = self.positions(shapes, layout.text_lengths, image.device, places)
        tokens = (padding.pack_image(image), padding.pack_text(text))
        return padding.unpack_image(self._forward_packed(*tokens, shapes, turns, layout, conditions))

    def _forward_packed(
        self,
        image: Tensor,
        text: Tensor,
        shapes: ImgShapes | None,
        turns: tuple[Tensor, Tensor] | None,
        layout: RaggedLayout,
        conditions: dict[str, Any],
    ) -> Tensor:
        """Packed tokens in and out. Samples that are all alike are an ordinary batch, and run as one."""
        if layout.uniform and turns is None:
            image, text = (x.unflatten(0, (layout.batch_size, -1)) for x in (image, text))
            return (
                super().forward(image, text, None, img_shapes=shapes, **conditions, return_dict=False)[0].flatten(0, 1)
            )
        _refuse(conditions)
        require_plain_attention(self.transformer_blocks, QwenDoubleStreamAttnProcessor2_0)
        turns = turns or self.positions(shapes, layout.text_lengths, image.device)
        known = ("timestep", "additional_t_cond", "attention_kwargs")
        return self._forward_ragged(image, text, shapes, turns, layout, **{name: conditions[name] for name in known})

    def positions(
        self,
        img_shapes: ImgShapes | None,
        text_lengths: Sequence[int],
        device: torch.device,
        text_places: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Complex turns of all image `(N, D / 2)` and text tokens `(L, D / 2)` of a batch, from diffusers' own tables.

        `text_places` are the places of each sample's tokens in its text, where some are left out.
        """
        if img_shapes is None:
            raise ValueError("img_shapes is needed to compute positions: pass it, or image_rotary_emb.")
        image, text = [], []
        for index, (shapes, length) in enumerate(zip(img_shapes, text_lengths, strict=True)):
            places = None if text_places is None else text_places[index]
            reach = length if places is None else int(places[-1]) + 1 if len(places) else 0
            farthest = max(max(rows, columns) // 2 for _, rows, columns in shapes) + reach
            frames = max(number + count for number, (count, _, _) in enumerate(shapes))
            if frames > MOST_IMAGES or farthest > POSITIONS:
                raise ValueError(
                    f"sample {index} has {len(shapes)} images and needs {farthest} positions; there are {POSITIONS}."
                )
            image_turns, text_turns = self.pos_embed([list(shapes)], max_txt_seq_len=reach, device=device)
            image.append(image_turns)
            text.append(text_turns if places is None else text_turns[places])
        return torch.cat(image), torch.cat(text)

    @apply_lora_scale("attention_kwargs")
    def _forward_ragged(
        self,
        image: Tensor,
        text: Tensor,
        img_shapes: ImgShapes | None,
        turns: tuple[Tensor, Tensor],
        layout: RaggedLayout,
        *,
        timestep: Tensor,
        additional_t_cond: Tensor | None,
        attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        batch = layout.batch_size
        image = self.img_in(layout.enter_image(image))
        text = self.txt_in(self.txt_norm(layout.enter_text(text)))
        timestep = timestep.to(image.dtype)
        modulate_index = None
        if self.zero_cond_t:
            timestep = torch.cat([timestep, timestep * 0])
            if additional_t_cond is not None:
                additional_t_cond = additional_t_cond.repeat(2)
            modulate_index = layout.image_sample + batch * layout.enter_image(_is_control(img_shapes, image.device))
        temb = self.time_text_embed(timestep, image, additional_t_cond)
        rotary = _joint_rotary(turns, layout)

        checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        run = self._gradient_checkpointing_func if checkpointing else _call
        ending = ending_of(layout, self.transformer_blocks)
        for block in self.transformer_blocks:
            at = ending if block is self.transformer_blocks[-1] else layout
            text, image = run(block, image, text, None, temb, rotary, None, modulate_index, at)

        norm = self.norm_out
        scale, shift = norm.linear(norm.silu(temb[:batch]).to(image.dtype)).chunk(2, dim=1)
        return ending.leave_image(self.proj_out(norm_modulate(norm.norm, image, scale, shift, ending.image_sample)))


def _padding(
    text: Tensor, image: Tensor, text_mask: Tensor | None, mask: Tensor | None, shapes: ImgShapes | None
) -> Padding:
    """Valid tokens, from every argument that says something about them."""
    padding = Padding.of(text, image, mask)
    text_valid, image_valid = padding.text, padding.image
    if text_mask is not None:
        text_valid = text_valid & as_bool("encoder_hidden_states_mask", text_mask, (len(text), text.shape[1]))
    if shapes is not None:
        lengths = torch.tensor([image_tokens(sample) for sample in shapes], device=image.device)
        if int(lengths.max()) > image.shape[1]:
            raise ValueError(
                f"img_shapes asks for {int(lengths.max())} image tokens, hidden_states has {image.shape[1]}."
            )
        from_shapes = torch.arange(image.shape[1], device=image.device)[None] < lengths[:, None]
        if mask is not None and not torch.equal(from_shapes, image_valid):
            raise ValueError("attention_mask and img_shapes disagree about which image tokens are valid.")
        image_valid = from_shapes
    return Padding(text_valid, image_valid)


def _as_lists(img_shapes: ImgShapes | None, batch: int) -> list[list[ImageShape]] | None:
    """Shapes per sample; diffusers also takes a bare `(1, rows, columns)` for a sample with one image.

    Its pipelines give one entry per prompt, whatever `num_images_per_prompt` is: each stands for that many samples.
    """
    if img_shapes is None:
        return None
    if not img_shapes or batch % len(img_shapes):
        raise ValueError(f"img_shapes has {len(img_shapes)} samples, hidden_states {batch}.")
    nested: list[Any] = [[sample] if isinstance(sample[0], int) else sample for sample in img_shapes]
    lists = [[tuple(shape) for shape in sample] for sample in nested]
    return [sample for sample in lists for _ in range(batch // len(lists))]


def _pack_rotary(turns: tuple[Tensor, Tensor], padding: Padding) -> tuple[Tensor, Tensor]:
    image, text = (x if x.ndim == 3 else x.expand(len(padding.image), -1, -1) for x in turns)
    return padding.pack_image(image), padding.pack_text(text)


def _joint_rotary(turns: tuple[Tensor, Tensor], layout: RaggedLayout) -> Rotary:
    image, text = (torch.view_as_real(x) for x in turns)
    return layout.join(layout.enter_text(text), layout.enter_image(image))[:, None]


def _is_control(img_shapes: ImgShapes | None, device: torch.device) -> Tensor:
    """`(N,)` 1 for tokens of controls, 0 for tokens of targets."""
    if img_shapes is None:
        raise ValueError("img_shapes is needed to tell controls from targets (zero_cond_t).")
    flags = [int(index > 0) for shapes in img_shapes for index in range(len(shapes))]
    counts = [image_tokens([shape]) for shapes in img_shapes for shape in shapes]
    return upload(torch.tensor(flags).repeat_interleave(torch.tensor(counts)), device)


def _call(block: torch.nn.Module, *args: Any) -> Any:
    return block(*args)


def _refuse(conditions: dict[str, Any]) -> None:
    if conditions["controlnet_block_samples"] is not None:
        raise ValueError("ControlNet residuals are not supported for samples of different sizes: run them one by one.")
    if conditions["guidance"] is not None:
        raise ValueError("Qwen-Image takes no guidance value: use true CFG.")
    unknown = sorted(set(conditions["attention_kwargs"] or {}) - {"scale"})
    if unknown:
        raise ValueError(f"attention_kwargs {unknown} are not supported for samples of different sizes.")
