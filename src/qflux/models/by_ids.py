"""Transformers whose tokens bring their position ids along: from either calling convention to a ragged forward.

Shapes: B samples; P text and S image tokens per padded sample; L, N text and image tokens of the whole batch; A axes
of a position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qflux.models.padding import Padding
from qflux.ragged.layout import PackedLayout, RaggedLayout


class Tokens(NamedTuple):
    """What a forward is about: padded `(B, S, C)`, `(B, P, C)` with ids of all samples or of each, or packed."""

    image: Tensor
    text: Tensor
    img_ids: Tensor
    txt_ids: Tensor


class RaggedByIds:
    """Adds samples of different sizes to a transformer of diffusers; the class it is mixed into says how it runs."""

    config: Any

    def _stock(self, tokens: Tokens, conditions: dict[str, Any]) -> Tensor:
        """diffusers' own forward, on an ordinary batch with ids `(S, A)` and `(P, A)`."""
        raise NotImplementedError

    def _may_run_stock(self, image: Tensor) -> bool:
        """Whether diffusers' own forward gives the right gradients of such tokens with every kernel."""
        return True

    def _ragged(self, tokens: Tokens, layout: RaggedLayout, conditions: dict[str, Any]) -> Tensor:
        """The forward on packed tokens `(N, C)` and `(L, C)` with ids of each."""
        raise NotImplementedError

    def run_padded(self, tokens: Tokens, mask: Tensor | None, conditions: dict[str, Any]) -> Tensor:
        """diffusers' convention: an ordinary batch as it is, anything else packed, run, and put back into zeros."""
        axes = len(self.config.axes_dims_rope)
        image, text = tokens.image, tokens.text
        img_ids = checked_ids("img_ids", tokens.img_ids, image, axes)
        txt_ids = checked_ids("txt_ids", tokens.txt_ids, text, axes)
        ordinary = Tokens(image, text, first_of(img_ids), first_of(txt_ids))
        if mask is None and img_ids.ndim == txt_ids.ndim == 2:
            # Decided without a look at any value, so that this call can be compiled and exported whole.
            return self._stock(ordinary, conditions)
        padding = Padding.of(text, image, mask)
        if padding.is_empty and shared(img_ids) and shared(txt_ids):
            return self._stock(ordinary, conditions)
        packed = Tokens(
            padding.pack_image(image),
            padding.pack_text(text),
            padding.pack_image(img_ids.expand(len(image), -1, -1)),
            padding.pack_text(txt_ids.expand(len(text), -1, -1)),
        )
        layout = PackedLayout.build(
            padding.text_lengths,
            padding.image_lengths,
            image.device,
            uniform=same_samples(padding.text_lengths, packed.txt_ids)
            and same_samples(padding.image_lengths, packed.img_ids),
        )
        return padding.unpack_image(self.run_packed(packed, layout, conditions))

    def run_packed(self, tokens: Tokens, layout: RaggedLayout, conditions: dict[str, Any]) -> Tensor:
        """Packed tokens in and out. Samples that are all alike are an ordinary batch, and run as one."""
        if layout.uniform and self._may_run_stock(tokens.image):
            alike = Tokens(*(x.unflatten(0, (layout.batch_size, -1)) for x in tokens))
            ordinary = alike._replace(img_ids=alike.img_ids[0], txt_ids=alike.txt_ids[0])
            return self._stock(ordinary, conditions).flatten(0, 1)
        unknown = sorted(set(conditions["joint_attention_kwargs"] or {}) - {"scale"})
        if unknown:
            raise ValueError(f"joint_attention_kwargs {unknown} are not supported for samples of different sizes.")
        return self._ragged(tokens, layout, conditions)


def checked_ids(name: str, ids: Tensor, tokens: Tensor, axes: int) -> Tensor:
    """Position ids `(S, A)` of all samples or `(B, S, A)` of each; one entry for the batch is the former."""
    ids = ids[0] if ids.ndim == 3 and len(ids) == 1 else ids
    batch, width = tokens.shape[:2]
    if not torch.compiler.is_compiling() and tuple(ids.shape) not in ((width, axes), (batch, width, axes)):
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; expected {(width, axes)} or {(batch, width, axes)}.")
    return ids


def shared(ids: Tensor) -> bool:
    """All samples have the same ids."""
    return ids.ndim == 2 or bool((ids == ids[:1]).all())


def first_of(ids: Tensor) -> Tensor:
    """Those of the first sample."""
    return ids if ids.ndim == 2 else ids[0]


def same_samples(lengths: list[int], ids: Tensor) -> bool:
    """Samples of these lengths have the same positions."""
    return len(set(lengths)) == 1 and shared(ids.unflatten(0, (len(lengths), lengths[0])))
