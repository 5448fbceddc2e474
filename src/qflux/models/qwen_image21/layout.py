"""Where the tokens of a batch of Qwen-Image-2.1 lie, where they stand in their samples, and how noisy they are.

Shapes: B samples, R targets, L text, N image, T = L + N joint tokens of the whole batch; C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qflux.models.qwen_image21.arrangement import arrange, positions
from qflux.ragged.interleave import Interleave
from qflux.ragged.layout import PackedLayout, PaddedLayout, RaggedLayout
from qflux.ragged.prefix import Continued, PrefixMemory, Recorded
from qflux.ragged.shapes import Shapes, image_tokens
from qflux.ragged.transfer import upload

SLOT = 4
"""Tokens of an image for which there is one place in the text: 2 x 2."""

Sample = tuple[int, Shapes, tuple[int, ...]]
"""Text tokens, images, and the text tokens before each control."""


class Segments(NamedTuple):
    """Parts of a sample that follow one another.

    Their lengths are those of tensors that hold nothing: compiled code takes lengths of tensors for what may vary, and
    numbers for what never does.
    """

    markers: tuple[Tensor, ...]
    """`(length, 0)` each."""
    is_text: tuple[bool, ...]

    def ranges(self) -> list[tuple[int, int, bool]]:
        """First token, the one after the last, and whether it is text, as diffusers' blocks want them."""
        found, start = [], 0
        for marker, is_text in zip(self.markers, self.is_text, strict=True):
            found.append((start, start + marker.shape[0], is_text))
            start = start + marker.shape[0]
        return found


@dataclass(frozen=True)
class Alike:
    """What diffusers' blocks need to know of samples that have one arrangement and one target."""

    segments: Segments
    """Of everything before the target."""
    is_target: Tensor
    """`(t,)` of the tokens of a sample."""
    text_rows: Tensor
    """`(L,)` where text tokens stand among text tokens and places of images."""
    width: int
    """Of a sample's text tokens and places together."""
    count: int
    """B."""

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device | str | None) -> Alike | None:
        text, shapes, places = samples[0]
        if len(shapes.targets) > 1 or any(sample != samples[0] for sample in samples[1:]):
            return None
        *before, target = arrange(*samples[0]).spans
        is_target = torch.zeros(target.queries[1], dtype=torch.bool)
        is_target[target.queries[0] :] = True
        slots = [image_tokens([shape]) // SLOT for shape in shapes.controls]
        rows = [
            token + sum(count for place, count in zip(places, slots, strict=True) if place <= token)
            for token in range(text)
        ]
        width = text + sum(slots)
        of_batch = (torch.tensor(rows, dtype=torch.long) + width * torch.arange(len(samples))[:, None]).flatten()
        return cls(
            segments=Segments(
                tuple(torch.empty(span.width, 0, device=device) for span in before),
                tuple(span.causal for span in before),
            ),
            is_target=upload(is_target, device),
            text_rows=upload(of_batch, device),
            width=width,
            count=len(samples),
        )

    def with_slots(self, text: Tensor) -> Tensor:
        """Text `(L, …)` as diffusers takes it, `(B, width, …)`, with zeros in places of images."""
        rows = text.new_zeros(self.count * self.width, *text.shape[1:]).index_copy(0, self.text_rows, text)
        return rows.unflatten(0, (self.count, self.width))


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
    alike: Alike | None
    """Where all samples have one arrangement and one target."""

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
        samples: list[Sample] = list(zip(text, shapes, map(tuple, places), strict=True))
        packed = PackedLayout.build(
            text,
            [sample.tokens for sample in shapes],
            device,
            arrangements=[arrange(*sample) for sample in samples],
            targets=[sample.target_tokens for sample in shapes],
        )
        of_text, of_image = zip(*(positions(*sample) for sample in samples), strict=True)
        count, rows = sum(len(sample.targets) for sample in shapes), list[Tensor]()
        numbers = iter(range(count))
        for sample in shapes:
            rows += [torch.full((image_tokens([shape]),), next(numbers)) for shape in sample.targets]
            rows.append(torch.full((sample.control_tokens,), count))
        alike = Alike.of(samples, device)
        return cls(
            joint=PaddedLayout.of(packed) if padded and alike is None else packed,
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
            alike=alike,
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
