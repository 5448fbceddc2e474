"""The last block of a transformer makes little that nobody reads: of text and controls, keys and values.

Behind it only targets are read. So it has their queries only, its MLP sees only them, and what it returns are targets;
in an edit they are less than half of all tokens. diffusers computes the others too, and throws them away. So do single
samples and samples that are alike, which run its own forward; and FLUX.2's single block, one layer of which makes all.

Shapes: M target, N image, T joint tokens of the whole batch (see `ragged.layout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from qflux.ragged.attention import Segments, described_attention, ragged_attention
from qflux.ragged.interleave import Interleave
from qflux.ragged.layout import PackedLayout, RaggedLayout
from qflux.ragged.spans import SpanAttention
from qflux.ragged.transfer import upload


def ending_of(layout: RaggedLayout, blocks: Sequence[nn.Module] | nn.ModuleList) -> RaggedLayout:
    """The layout on which the last of these blocks runs: if nobody said what is read, the layout itself."""
    if not len(blocks) or not isinstance(layout, PackedLayout) or layout.targets is None:
        return layout
    return Ending.of(layout, layout.targets)


@dataclass(frozen=True)
class Ending(RaggedLayout):
    """A layout of targets alone, each of which sees the whole sample that it is of."""

    whole: PackedLayout
    _joint_rows: Tensor
    """`(M,)` where targets lie in the joint sequence,"""
    _image_rows: Tensor
    """and among the image tokens."""
    _queries: Segments
    _keys: Segments
    _spans: SpanAttention | None

    @classmethod
    def of(cls, whole: PackedLayout, targets: Sequence[int]) -> Ending:
        device = whole.joint_sample.device
        samples = list(zip(whole.text_lengths, whole.image_lengths, targets, strict=True))
        lengths = [text + image for text, image, _ in samples]
        arranged = whole.arrangements
        orders = map(torch.arange, lengths) if arranged is None else [sample.order for sample in arranged]
        wanted, image_rows = list[Tensor](), list[Tensor]()
        starts = accumulate(whole.image_lengths, initial=0)
        for order, start, (text, _, count) in zip(orders, starts, samples, strict=False):
            number = order - text  # of an image token, wherever it stands; targets are the first
            wanted.append((number >= 0) & (number < count))
            image_rows.append(start + number[wanted[-1]])
        spans = None
        if arranged is not None:
            of_samples = [sample.spans for sample in arranged]
            spans = SpanAttention.of(of_samples, device, wanted=[rows.tolist() for rows in wanted])
        return cls(
            text_lengths=(0,) * len(samples),
            image_lengths=tuple(targets),
            uniform=False,
            streams=Interleave.build([0] * len(samples), targets, device),
            whole=whole,
            _joint_rows=upload(torch.cat(wanted).nonzero().squeeze(1), device),
            _image_rows=upload(torch.cat(image_rows), device),
            _queries=Segments.of(targets, device),
            _keys=Segments.of(lengths, device),
            _spans=spans,
        )

    @property
    def given(self) -> RaggedLayout:
        return self.whole

    def read(self, joint: Tensor) -> Tensor:
        return _Pick.apply(joint, self._joint_rows)

    def read_images(self, images: Tensor) -> Tensor:
        return _Pick.apply(images, self._image_rows)

    def read_text(self, text: Tensor) -> Tensor:
        return text[:0]

    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries `(M, H, D)`, keys and values `(T, H, D)`."""
        if query.is_meta:
            return described_attention(query, key, value)
        if self._spans is not None:
            return self._spans(query, key, value)
        return ragged_attention(query, key, value, self._queries, self._keys)

    def enter_text(self, tokens: Tensor) -> Tensor:
        return self.read_text(tokens)

    def enter_image(self, tokens: Tensor) -> Tensor:
        return self.read_images(tokens)

    def leave_text(self, tokens: Tensor) -> Tensor:
        return tokens

    def leave_image(self, tokens: Tensor) -> Tensor:
        """Target tokens `(M, …)` among image tokens `(N, …)`; controls are zero."""
        return tokens.new_zeros(len(self.whole.image_sample), *tokens.shape[1:]).index_copy(0, self._image_rows, tokens)


class _Pick(torch.autograd.Function):
    """Some rows, each once. `index_select` would add up its gradient: slow, and on CUDA not repeatable."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = tokens.shape[0]
        return tokens.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy(0, rows, grad), None
