"""The FLUX.3 transformer on ragged batches: diffusers' class, checkpoints and LoRA keys; a second way to run blocks.

Text, targets and controls go through blocks of their own first, in which each sees only its kind within its sample.
Then all of a sample is one sequence. Text and controls are modulated as if they had no noise.

Shapes: B samples; L text, M target, K control, T joint tokens of the whole batch; C channels (see `ragged.layout`).
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_flux3 import (
    Flux3AttnProcessor,
    Flux3ModeTransformerBlock,
    Flux3SingleTransformerBlock,
)
from diffusers.utils.peft_utils import apply_lora_scale
from torch import Tensor, nn

from qflux.models.compat import picklable, require_plain_attention
from qflux.models.flux3.layout import Flux3Layout, Flux3Padding, Streams
from qflux.models.projection import TextProjection
from qflux.ragged.ending import ending_of
from qflux.ragged.heads import turned_heads
from qflux.ragged.layout import PackedLayout, RaggedLayout
from qflux.ragged.modulation import add_gated, norm_modulate
from qflux.ragged.recomputed.unread import Unread
from qflux.ragged.rope import Rotary, rotary_from


class Mode(NamedTuple):
    """The tokens of one kind: `(n, C)`, the sample of each, and their position ids `(n, 4)`."""

    tokens: Tensor
    sample: Tensor
    ids: Tensor


def _parallel(block: Any, tokens: Tensor, table: Tensor, row: Tensor, rotary: Rotary, layout: RaggedLayout) -> Tensor:
    """Attention and MLP of the same modulated tokens `(T, C)`, with each token's own row of the table `(R, 3 C)`."""
    shift, scale, _ = table.chunk(3, dim=-1)
    modulated = norm_modulate(block.norm, tokens, scale, shift, row)
    attn, read = block.attn, layout.read(modulated)
    # In this order, what one layer has rounded to 8 bits is what the next one reads.
    key, value, query = (
        project(x).unflatten(-1, (attn.heads, -1))
        for project, x in ((attn.to_k, modulated), (attn.to_v, modulated), (attn.to_q, read))
    )
    query = turned_heads(query, attn.norm_q, layout.read(rotary), exact=True)
    key = turned_heads(key, attn.norm_k, rotary, exact=True)
    mlp = block.ff(read)  # before attention, where compiled code breaks off
    attended = layout.attend(query, key, value).flatten(1)
    gate = table.chunk(3, dim=-1)[2]  # behind attention, where compiled code begins anew
    return add_gated(layout.read(tokens), gate, attn.to_out[1](attn.to_out[0](attended)) + mlp, layout.read(row))


class RaggedFlux3ModeBlock(Flux3ModeTransformerBlock):
    """The block of one kind of tokens. With a layout it runs on concatenated tokens."""

    unread: ClassVar = Unread(("attn.to_out.0", "ff.linear_out"))

    def forward(
        self,
        hidden_states: Tensor,
        temb_mod: Tensor,
        image_rotary_emb: Any,
        row: Tensor | None = None,
        layout: RaggedLayout | None = None,
    ) -> Tensor:
        """Ragged: tokens `(T, C)`, modulation `(R, 3 C)`, each token's row; without a layout it is diffusers' own."""
        if hidden_states.ndim == 3 and hidden_states.shape[1] == 0:
            return self._of_nothing(hidden_states, temb_mod, image_rotary_emb)
        if layout is None or row is None:
            return super().forward(hidden_states, temb_mod, image_rotary_emb)
        return _parallel(self, hidden_states, temb_mod, row, image_rotary_emb, layout)

    def _of_nothing(self, tokens: Tensor, modulation: Tensor, rotary: Any) -> Tensor:
        """No tokens `(B, 0, C)`, which diffusers' rotary positions can't turn."""
        none = torch.zeros(0, dtype=torch.long, device=tokens.device)
        layout = PackedLayout.build([0], [0], tokens.device)
        flat = _parallel(self, tokens.flatten(0, 1), modulation.flatten(0, 1), none, rotary_from(*rotary), layout)
        return flat.view_as(tokens)


class RaggedFlux3SingleBlock(Flux3SingleTransformerBlock):
    """The block of whole samples."""

    unread: ClassVar = Unread(("attn.to_out.0", "ff.linear_out"))

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        temb_mod: Tensor,
        temb_mod_context: Tensor | None,
        image_rotary_emb: Any,
        row: Tensor | None = None,
        layout: RaggedLayout | None = None,
    ) -> Any:
        """Ragged: joint tokens `(T, C)` in and out, modulation `(R, 3 C)`; the last one returns targets `(M, C)`.

        Without a layout it is diffusers' own.
        """
        if layout is None or row is None:
            return super().forward(hidden_states, encoder_hidden_states, temb_mod, temb_mod_context, image_rotary_emb)
        return _parallel(self, hidden_states, temb_mod, row, image_rotary_emb, layout)


class Flux3Transformer2DModel(diffusers.Flux3Transformer2DModel):
    """diffusers' FLUX.3 transformer that also takes samples of different sizes in one batch."""

    # A pipeline saves its parts by module and class: see FLUX's transformer.
    __module__ = diffusers.Flux3Transformer2DModel.__module__
    _no_split_modules: ClassVar = ["RaggedFlux3ModeBlock", "RaggedFlux3SingleBlock"]
    _repeated_blocks: ClassVar = ["RaggedFlux3ModeBlock", "RaggedFlux3SingleBlock"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return picklable(super().__reduce_ex__(protocol), __name__)

    @functools.wraps(diffusers.Flux3Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The same modules under the same names, hence the same checkpoints; only `forward` gains a case.
        for block in self.mode_block_list:
            block.__class__ = RaggedFlux3ModeBlock
        for block in self.single_transformer_blocks:
            block.__class__ = RaggedFlux3SingleBlock
        self.context_embedder.__class__ = TextProjection

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in. Quantized to 4 bits, nothing that is left in a floating-point format would tell."""
        quantized = getattr(getattr(self, "hf_quantizer", None), "quantization_config", None)
        return getattr(quantized, "bnb_4bit_compute_dtype", None) or super().dtype

    @property
    def mode_block_list(self) -> list[nn.Module]:
        """The blocks of all three kinds of tokens, in the order in which they run."""
        return [*self.txt_mode_blocks, *self.mode_blocks["image"], *self.mode_blocks["image_cond"]]

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
        image_cond_hidden_states: Tensor | None = None,
        image_cond_ids: Tensor | None = None,
        target_timestep: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        attention_mask: Tensor | None = None,
        layout: Flux3Layout | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """diffusers' arguments, and two ways to pass samples of different sizes and numbers of references.

        Padded: ids may be of all samples or `(B, …, 4)` of each, and `attention_mask` `(B, text + target + control)`,
        bool or 0/1, says which tokens are valid. Padding is removed before anything is computed; its output rows are
        zero.

        Packed: with `layout`, `hidden_states` is `(M, in_channels)`, `image_cond_hidden_states` `(K, in_channels)`,
        `encoder_hidden_states` `(L, text channels)`, ids have as many rows, and the output is `(M, in_channels)`.
        `timestep` and `target_timestep` have one row per sample, as always.

        One sample, or samples of one shape with nothing masked, run diffusers' forward itself.
        """
        given = (txt_ids, img_ids, image_cond_ids)
        if layout is None and attention_mask is None and all(ids is None or ids.ndim == 2 for ids in given):
            # Decided without a look at any value, so that this call can be compiled and exported whole.
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                timestep,
                img_ids,
                txt_ids,
                image_cond_hidden_states,
                image_cond_ids,
                target_timestep,
                attention_kwargs,
                return_dict,
            )
        if (target_timestep is not None) != bool(self.config.flow_map):
            raise ValueError("target_timestep is needed by, and only by, a distilled FLUX.3 (flow_map).")
        if image_cond_hidden_states is None or image_cond_ids is None:
            image_cond_hidden_states, image_cond_ids = hidden_states[..., :0, :], img_ids[..., :0, :]
        tokens = Streams(encoder_hidden_states, hidden_states, image_cond_hidden_states)
        ids = Streams(txt_ids, img_ids, image_cond_ids)
        conditions: dict[str, Any] = {"levels": (timestep, target_timestep), "attention_kwargs": attention_kwargs}
        if layout is not None:
            output = self._run_packed(tokens, ids, layout, conditions)
        elif (padding := Flux3Padding.of(tokens, ids, attention_mask)).is_empty:
            output = self._stock(tokens, padding.first_ids, **conditions)
        else:
            output = padding.unpack(self._run_packed(*padding.packed, padding.layout, conditions))
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _stock(
        self,
        tokens: Streams,
        ids: Streams,
        levels: tuple[Tensor, Tensor | None],
        attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        """diffusers' own forward, on an ordinary batch.

        Where there are no controls it gets none of them, so that their blocks run and have a gradient of zero as in
        any other batch: what a step does to them must not depend on how it is cut, nor ranks part ways.
        """
        text, target, control = tokens
        noise, jump = levels
        return super().forward(
            target, text, noise, ids.target, ids.text, control, ids.control, jump, attention_kwargs, return_dict=False
        )[0]

    def _run_packed(self, tokens: Streams, ids: Streams, layout: Flux3Layout, conditions: dict[str, Any]) -> Tensor:
        """Packed tokens in and out. Samples that are all alike are an ordinary batch, and run as one."""
        if layout.uniform:
            alike = Streams(*(x.unflatten(0, (layout.batch_size, len(x) // layout.batch_size)) for x in tokens))
            first = Streams(*(x[: len(x) // layout.batch_size] for x in ids))
            return self._stock(alike, first, **conditions).flatten(0, 1)
        unknown = sorted(set(conditions["attention_kwargs"] or {}) - {"scale"})
        if unknown:
            raise ValueError(f"attention_kwargs {unknown} are not supported for samples of different sizes.")
        require_plain_attention([*self.mode_block_list, *self.single_transformer_blocks], Flux3AttnProcessor)
        modes = (
            Mode(tokens.text, layout.text.text_sample, ids.text),
            Mode(tokens.target, layout.target.text_sample, ids.target),
            # Samples without references are not in its layout: the numbers of samples are those of the whole batch.
            Mode(tokens.control, layout.control.enter_text(layout.images.second_sample), ids.control),
        )
        return self._forward_ragged(modes, layout, **conditions)

    @apply_lora_scale("attention_kwargs")
    def _forward_ragged(
        self,
        modes: tuple[Mode, Mode, Mode],
        layout: Flux3Layout,
        *,
        levels: tuple[Tensor, Tensor | None],
        attention_kwargs: dict[str, Any] | None,
    ) -> Tensor:
        text, target, control = modes
        noisy, clean = self._conditioning(*levels, target.tokens.dtype)
        tables = {"txt": F.silu(clean), "image": F.silu(noisy), "image_cond": F.silu(clean)}
        text_out = self._run_mode("txt", text, layout.text, tables)
        target_out = self._run_mode("image", target, layout.target, tables)
        # Without any control it runs on no tokens: all ranks of a sharded model go through the same blocks.
        control_out = self._run_mode("image_cond", control, layout.control, tables)
        image_out, ids = layout.images.join(target_out, control_out), layout.images.join(target.ids, control.ids)

        whole, batch = layout.joint, layout.joint.batch_size
        joint = whole.join(whole.enter_text(text_out), whole.enter_image(image_out))
        rotary = rotary_from(*self.pos_embed(whole.join(whole.enter_text(text.ids), whole.enter_image(ids))))
        table = torch.cat(
            [self.single_stream_modulations[name](tables[name]) for name in ("image", "image_cond", "txt")]
        )
        of_image = layout.images.join(layout.images.first_sample, batch + layout.images.second_sample)
        row = whole.join(2 * batch + whole.text_sample, whole.enter_image(of_image))
        blocks = self.single_transformer_blocks
        ending = ending_of(whole, blocks)
        for block in blocks:
            joint = self._run(block, joint, None, table, None, rotary, row, ending if block is blocks[-1] else whole)

        of_target, _ = layout.images.split(ending.leave_image(ending.split(joint)[1]))
        norm = self.norm_out
        scale, shift = norm.linear(norm.act_fn(noisy)).chunk(2, dim=-1)
        return self.proj_out(norm_modulate(norm.norm, of_target, scale, shift, layout.images.first_sample))

    def _conditioning(self, timestep: Tensor, jump: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`(B, C)` of what has the noise of its sample, and of what has none."""

        def embed(level: Tensor, embedder: nn.Module) -> Tensor:
            return embedder(self.time_proj(level.to(dtype) * 1000).to(dtype))

        noisy = embed(timestep, self.timestep_embedder)
        clean = embed(torch.zeros_like(timestep), self.timestep_embedder)
        if jump is None:
            return noisy, clean
        onward = embed(jump, self.target_timestep_embedder)
        return noisy + onward, clean + onward

    def _run_mode(self, name: str, mode: Mode, layout: RaggedLayout, tables: dict[str, Tensor]) -> Tensor:
        """The tokens of one kind, embedded and through their own blocks; packed in, packed out."""
        embedder = self.context_embedder if name == "txt" else self.x_embedders[name]
        blocks = self.txt_mode_blocks if name == "txt" else self.mode_blocks[name]
        tokens = embedder(layout.enter_text(mode.tokens))
        rotary = rotary_from(*self.pos_embed(layout.enter_text(mode.ids)))
        table = self.early_stream_modulations[name](tables[name])
        for block in blocks:
            tokens = self._run(block, tokens, table, rotary, mode.sample, layout)
        return layout.leave_text(tokens)

    def _run(self, block: nn.Module, *args: Any) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(block, *args)
        return block(*args)
