"""Where each sample's tokens lie when a whole batch is one token sequence.

Shape legend, used in all tensor code of qflux:

    B  samples in the batch
    L  text tokens,  N  image tokens,  T = L + N  joint tokens; each summed over the batch
    C  channels of a token,  H  attention heads,  D  channels of a head

Two streams enter a transformer: all text tokens `(L, C)` and all image tokens `(N, C)`, samples one after another. The
joint sequence `(T, C)` is `[text_0 | image_0 | text_1 | image_1 | …]`, so that a sample is contiguous; where images
stand inside the text, an `Arrangement` says so. Linear layers, norms and MLPs don't care which sample a token belongs
to; attention, modulation and positions do, and those three read everything they need from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.ragged.attention import Segments, described_attention, masked_attention, ragged_attention
from qflux.ragged.interleave import Interleave
from qflux.ragged.shapes import ImageShape, image_tokens
from qflux.ragged.spans import Arrangement, SpanAttention, mask_of


@dataclass(frozen=True)
class RaggedLayout(ABC):
    """Index tensors over the text, image and joint sequences of one batch.

    Callers hand over packed tokens and get packed tokens back; what a layout holds in between is its own business.
    `enter_…` and `leave_…` are the border.
    """

    text_lengths: tuple[int, ...]
    image_lengths: tuple[int, ...]
    uniform: bool
    """All samples have the same text length and the same images: an ordinary batch, which needs no ragged code."""
    streams: Interleave
    """Text and image tokens as two streams and in joint order."""

    @property
    def batch_size(self) -> int:
        return len(self.text_lengths)

    @property
    def text_sample(self) -> Tensor:
        """`(L,)` the sample of each text token."""
        return self.streams.first_sample

    @property
    def image_sample(self) -> Tensor:
        """`(N,)` the sample of each image token."""
        return self.streams.second_sample

    @property
    def joint_sample(self) -> Tensor:
        """`(T,)` the sample of each joint token."""
        return self.streams.joint_sample

    @property
    def given(self) -> RaggedLayout:
        """The layout of what a block is given; what it returns has this one. They differ in the last block only."""
        return self

    def read(self, joint: Tensor) -> Tensor:
        """Of joint tokens `(T, …)` that a block is given, those whose result is read."""
        return joint

    def read_images(self, images: Tensor) -> Tensor:
        """The same of image tokens `(N, …)`."""
        return images

    def read_text(self, text: Tensor) -> Tensor:
        """The same of text tokens `(L, …)`."""
        return text

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """Text `(L, …)` and image `(N, …)` tokens in joint order `(T, …)`."""
        return self.streams.join(text, image)

    def split(self, joint: Tensor) -> tuple[Tensor, Tensor]:
        """Joint tokens `(T, …)` as text `(L, …)` and image `(N, …)` tokens."""
        return self.streams.split(joint)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of joint tokens `(T, H, D)` in which a token sees its own sample only."""

    @abstractmethod
    def enter_text(self, tokens: Tensor) -> Tensor:
        """Packed text tokens as this layout holds them."""

    @abstractmethod
    def enter_image(self, tokens: Tensor) -> Tensor:
        """Packed image tokens as this layout holds them."""

    @abstractmethod
    def leave_text(self, tokens: Tensor) -> Tensor:
        """The inverse of `enter_text`."""

    @abstractmethod
    def leave_image(self, tokens: Tensor) -> Tensor:
        """The inverse of `enter_image`."""


@dataclass(frozen=True)
class PackedLayout(RaggedLayout):
    """Valid tokens only: no padding exists anywhere."""

    arrangements: tuple[Arrangement, ...] | None
    """Of each sample; none where its text comes first, then its images, and everything sees everything."""
    targets: tuple[int, ...] | None
    """How many image tokens of each sample, its first, are read in the end (`ragged.ending`); none: all of them."""
    _samples: Segments
    _spans: SpanAttention | None

    @classmethod
    def build(
        cls,
        text_lengths: Sequence[int],
        image_lengths: Sequence[int],
        device: torch.device | str | None = None,
        uniform: bool = False,
        arrangements: Sequence[Arrangement] | None = None,
        targets: Sequence[int] | None = None,
    ) -> PackedLayout:
        lengths = [text + image for text, image in zip(text_lengths, image_lengths, strict=True)]
        orders = [sample.order for sample in arrangements] if arrangements else None
        return cls(
            text_lengths=tuple(text_lengths),
            image_lengths=tuple(image_lengths),
            uniform=uniform,
            streams=Interleave.build(text_lengths, image_lengths, device, orders),
            arrangements=tuple(arrangements) if arrangements else None,
            targets=None if targets is None else tuple(targets),
            _spans=SpanAttention.of([sample.spans for sample in arrangements], device) if arrangements else None,
            _samples=Segments.of(lengths, device),
        )

    @classmethod
    def from_shapes(
        cls,
        text_lengths: Sequence[int],
        img_shapes: Sequence[Sequence[ImageShape]],
        device: torch.device | str | None = None,
        arrangements: Sequence[Arrangement] | None = None,
        ragged: bool = False,
        targets: Sequence[int] | None = None,
    ) -> PackedLayout:
        """The layout of samples with these text lengths and these images (target first).

        With `ragged` it is never taken to be an ordinary batch.
        """
        image_lengths = [image_tokens(shapes) for shapes in img_shapes]
        uniform = len(set(text_lengths)) == 1 and len({tuple(shapes) for shapes in img_shapes}) == 1 and not ragged
        return cls.build(text_lengths, image_lengths, device, uniform, arrangements, targets)

    # A graph break on purpose: a loop over samples inside a compiled graph would be unrolled and compiled anew for
    # every batch size, and no fusion crosses an attention kernel anyway.
    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.is_meta:
            return described_attention(query, key, value)
        if self._spans is not None:
            return self._spans(query, key, value)
        return ragged_attention(query, key, value, self._samples)

    def enter_text(self, tokens: Tensor) -> Tensor:
        return tokens

    def enter_image(self, tokens: Tensor) -> Tensor:
        return tokens

    def leave_text(self, tokens: Tensor) -> Tensor:
        return tokens

    def leave_image(self, tokens: Tensor) -> Tensor:
        return tokens


@dataclass(frozen=True)
class PaddedLayout(RaggedLayout):
    """Every sample padded to the longest, with a mask: what other trainers do, kept as the reference.

    Same block code as `PackedLayout`, `B * max(L_b)` text and `B * max(N_b)` image rows, of which some are zeros.
    """

    mask: Tensor
    """`(B, S)` true where a joint token of a padded sample is valid, or `(B, S, S)` where one sees another."""
    _text_rows: Tensor
    _image_rows: Tensor

    @classmethod
    def of(cls, packed: PackedLayout) -> PaddedLayout:
        batch, device = packed.batch_size, packed.text_sample.device
        text_width, image_width = max(packed.text_lengths), max(packed.image_lengths)
        text_valid = _valid(packed.text_lengths, text_width)
        image_valid = _valid(packed.image_lengths, image_width)
        return cls(
            text_lengths=packed.text_lengths,
            image_lengths=packed.image_lengths,
            uniform=packed.uniform,
            streams=Interleave.build([text_width] * batch, [image_width] * batch, device),
            mask=_mask(packed, torch.cat([text_valid, image_valid], dim=1)).to(device),
            _text_rows=text_valid.flatten().nonzero().squeeze(1).to(device),
            _image_rows=image_valid.flatten().nonzero().squeeze(1).to(device),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return masked_attention(query, key, value, self.mask)

    def enter_text(self, tokens: Tensor) -> Tensor:
        return _scatter_rows(tokens, self._text_rows, len(self.text_sample))

    def enter_image(self, tokens: Tensor) -> Tensor:
        return _scatter_rows(tokens, self._image_rows, len(self.image_sample))

    def leave_text(self, tokens: Tensor) -> Tensor:
        return tokens.index_select(0, self._text_rows)

    def leave_image(self, tokens: Tensor) -> Tensor:
        return tokens.index_select(0, self._image_rows)


def padding_ratio(*batches: Sequence[int]) -> float:
    """The share of padded batches of these lengths that would be padding."""
    return 1.0 - sum(map(sum, batches)) / sum(len(lengths) * max(lengths) for lengths in batches)


def _mask(packed: PackedLayout, valid: Tensor) -> Tensor:
    """What sees what in padded samples. Their joint order is text, then images: only the mask knows another one."""
    if packed.arrangements is None:
        return valid
    mask = torch.eye(valid.shape[1], dtype=torch.bool).repeat(len(valid), 1, 1)  # padding sees itself, not nothing
    for row, sample in enumerate(packed.arrangements):
        places = valid[row].nonzero().squeeze(1)[sample.order]
        mask[row, places[:, None], places] = mask_of(sample.spans)
    return mask


def _valid(lengths: Sequence[int], width: int) -> Tensor:
    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def _scatter_rows(tokens: Tensor, rows: Tensor, total: int) -> Tensor:
    return tokens.new_zeros(total, *tokens.shape[1:]).index_copy(0, rows, tokens)
