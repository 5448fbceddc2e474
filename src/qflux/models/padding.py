"""The padded calling convention of diffusers, brought to packed tokens and back.

Shapes: B samples, P text and S image tokens per padded sample; L, N valid text and image tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """Which tokens of a padded batch are valid: text `(B, P)` and image `(B, S)`, both bool."""

    text: Tensor
    image: Tensor

    @classmethod
    def of(cls, text: Tensor, image: Tensor, mask: Tensor | None) -> Padding:
        """From text `(B, P, …)`, image `(B, S, …)` and a joint mask `(B, P + S)`, bool or 0/1; `None` is all valid."""
        batch, text_width, image_width = len(image), text.shape[1], image.shape[1]
        if mask is None:
            mask = image.new_ones(batch, text_width + image_width, dtype=torch.bool)
        valid = as_bool("attention_mask", mask, (batch, text_width + image_width))
        return cls(valid[:, :text_width], valid[:, text_width:])

    @cached_property
    def is_empty(self) -> bool:
        """Every token is valid."""
        return bool(self.text.all()) and bool(self.image.all())

    @cached_property
    def text_lengths(self) -> list[int]:
        return self.text.sum(1).tolist()

    @cached_property
    def image_lengths(self) -> list[int]:
        lengths: list[int] = self.image.sum(1).tolist()
        if 0 in lengths:
            raise ValueError(f"sample {lengths.index(0)} has no valid image token in attention_mask.")
        return lengths

    def pack_text(self, tokens: Tensor) -> Tensor:
        """`(B, P, …)` as `(L, …)`."""
        return tokens[self.text]

    def pack_image(self, tokens: Tensor) -> Tensor:
        """`(B, S, …)` as `(N, …)`."""
        return tokens[self.image]

    def unpack_image(self, tokens: Tensor) -> Tensor:
        """`(N, C)` at its places in `(B, S, C)`; padding rows are zero."""
        padded = tokens.new_zeros(*self.image.shape, tokens.shape[-1])
        return padded.masked_scatter(self.image[..., None], tokens)


def as_bool(name: str, mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """A mask as bool, checked: the right shape, and 1 for valid, 0 for padding."""
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; expected {shape}.")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{name} must hold 1 for valid and 0 for padding tokens; it is no additive mask.")
    return mask.bool()
