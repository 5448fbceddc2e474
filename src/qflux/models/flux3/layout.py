"""Where the tokens of a batch of FLUX.3 lie: text, targets and controls apart, and as whole samples; packed or padded.

Shapes: B samples; P text, S target, R control tokens per padded sample; L, M, K of the whole batch; A axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qflux.models.by_ids import checked_ids, first_of, same_samples, shared
from qflux.models.padding import Padding, as_bool
from qflux.ragged.interleave import Interleave
from qflux.ragged.layout import PackedLayout, PaddedLayout, RaggedLayout


class Streams(NamedTuple):
    """Something of each of the three kinds of tokens. Without controls, that of controls is empty."""

    text: Tensor
    target: Tensor
    control: Tensor


@dataclass(frozen=True)
class Flux3Layout:
    """Where the tokens of a batch lie, in the blocks of each kind and in those of whole samples."""

    text: RaggedLayout
    target: RaggedLayout
    control: RaggedLayout
    """Of the samples that have any."""
    images: Interleave
    """Targets and controls, as two streams and as the images of each sample."""
    joint: RaggedLayout
    uniform: bool
    """All samples have the same numbers of tokens at the same positions: an ordinary batch."""

    @property
    def batch_size(self) -> int:
        return self.joint.batch_size

    @classmethod
    def build(
        cls,
        text: Sequence[int],
        target: Sequence[int],
        control: Sequence[int],
        device: torch.device | str | None = None,
        padded: bool = False,
        uniform: bool = False,
    ) -> Flux3Layout:
        """From the tokens of each sample."""

        def layout(first: Sequence[int], second: Sequence[int], targets: Sequence[int] | None = None) -> RaggedLayout:
            packed = PackedLayout.build(first, second, device, targets=targets)
            return PaddedLayout.of(packed) if padded else packed

        def alone(lengths: Sequence[int]) -> RaggedLayout:
            return layout(lengths, [0] * len(lengths))

        shown = [length for length in control if length]
        return cls(
            text=alone(text),
            target=alone(target),
            control=alone(shown or [0]),
            images=Interleave.build(target, control, device),
            joint=layout(text, [sum(lengths) for lengths in zip(target, control, strict=True)], target),
            uniform=uniform,
        )


@dataclass(frozen=True)
class Flux3Padding:
    """The padded calling convention, brought to packed tokens and back."""

    tokens: Streams
    """`(B, P, …)`, `(B, S, …)`, `(B, R, …)`."""
    ids: Streams
    """`(P, A)` of all samples or `(B, P, A)` of each, and so on."""
    valid: Streams
    """`(B, P)`, `(B, S)`, `(B, R)`, all bool."""

    @classmethod
    def of(cls, tokens: Streams, ids: Streams, mask: Tensor | None) -> Flux3Padding:
        """From what a call has, and a joint mask `(B, P + S + R)`, bool or 0/1; `None` is all valid."""
        names, axes = ("txt_ids", "img_ids", "image_cond_ids"), ids.target.shape[-1]
        checked = (checked_ids(*each, axes) for each in zip(names, ids, tokens, strict=True))
        widths = [part.shape[1] for part in tokens]
        batch = len(tokens.target)
        if mask is None:
            mask = tokens.target.new_ones(batch, sum(widths), dtype=torch.bool)
        valid = as_bool("attention_mask", mask, (batch, sum(widths))).split(widths, dim=1)
        return cls(tokens, Streams(*checked), Streams(*valid))

    @property
    def is_empty(self) -> bool:
        """Every token is valid, and all samples have the same ids: an ordinary batch."""
        return all(bool(valid.all()) for valid in self.valid) and all(shared(ids) for ids in self.ids)

    @property
    def first_ids(self) -> Streams:
        """Those of the first sample."""
        return Streams(*(first_of(ids) for ids in self.ids))

    @cached_property
    def packed(self) -> tuple[Streams, Streams]:
        """Tokens and ids, valid ones only."""
        batch = len(self.tokens.target)
        tokens = (part[valid] for part, valid in zip(self.tokens, self.valid, strict=True))
        ids = (part.expand(batch, -1, -1)[valid] for part, valid in zip(self.ids, self.valid, strict=True))
        return Streams(*tokens), Streams(*ids)

    @cached_property
    def layout(self) -> Flux3Layout:
        text, target, control = (valid.sum(1).tolist() for valid in self.valid)
        if 0 in target:
            raise ValueError(f"sample {target.index(0)} has no valid image token in attention_mask.")
        lengths = (text, target, control)
        alike = all(same_samples(*each) for each in zip(lengths, self.packed[1], strict=True))
        return Flux3Layout.build(*lengths, self.tokens.target.device, uniform=alike)

    def unpack(self, output: Tensor) -> Tensor:
        """`(M, C)` at its places in `(B, S, C)`; padding rows are zero."""
        return Padding(self.valid.text, self.valid.target).unpack_image(output)
