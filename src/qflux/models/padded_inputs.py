"""The padded calling convention of diffusers, brought to packed tokens and back.

Shapes: B samples, S image and P text tokens per padded sample; N, L valid image and text tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.ragged.layout import PackedLayout


@dataclass(frozen=True)
class PaddedInputs:
    """`(B, S, C)` image tokens, `(B, P, C')` text tokens, their position ids, and which of them are valid."""

    image: Tensor
    text: Tensor
    raw_img_ids: Tensor
    raw_txt_ids: Tensor
    mask: Tensor | None

    def __post_init__(self) -> None:
        batch, image_width = self.image.shape[:2]
        text_width = self.text.shape[1]
        _check_ids("img_ids", self.raw_img_ids, batch, image_width)
        _check_ids("txt_ids", self.raw_txt_ids, batch, text_width)
        if self.mask is not None and tuple(self.mask.shape) != (batch, text_width + image_width):
            raise ValueError(
                f"attention_mask has shape {tuple(self.mask.shape)}; it must cover text and image tokens: "
                f"{(batch, text_width + image_width)}."
            )

        if self.mask is not None and not bool(((self.mask == 0) | (self.mask == 1)).all()):
            raise ValueError("attention_mask must hold 1 for valid and 0 for padding tokens; it is no additive mask.")

    @property
    def is_plain(self) -> bool:
        """An ordinary diffusers batch: nothing masked, positions shared."""
        if self.mask is not None and not bool(self.mask.bool().all()):
            return False
        return _shared(self.raw_img_ids) and _shared(self.raw_txt_ids)

    @property
    def img_ids(self) -> Tensor:
        return _first(self.raw_img_ids)

    @property
    def txt_ids(self) -> Tensor:
        return _first(self.raw_txt_ids)

    def pack(self) -> tuple[Tensor, Tensor, Tensor, Tensor, PackedLayout]:
        """Valid image tokens, text tokens, image ids, text ids, and their layout."""
        text_rows, image_rows = self._valid_rows()
        img_ids = _per_sample(self.raw_img_ids, len(self.image))[image_rows]
        txt_ids = _per_sample(self.raw_txt_ids, len(self.text))[text_rows]
        text_lengths, image_lengths = text_rows.sum(1).tolist(), image_rows.sum(1).tolist()
        if 0 in image_lengths:
            raise ValueError(f"sample {image_lengths.index(0)} has no valid image token in attention_mask.")
        layout = PackedLayout.build(
            text_lengths,
            image_lengths,
            self.image.device,
            uniform=_same_samples(text_lengths, txt_ids) and _same_samples(image_lengths, img_ids),
        )
        return self.image[image_rows], self.text[text_rows], img_ids, txt_ids, layout

    def unpack(self, tokens: Tensor) -> Tensor:
        """Image tokens `(N, C)` at their places in `(B, S, C)`; padding rows are zero."""
        _, image_rows = self._valid_rows()
        padded = tokens.new_zeros(*image_rows.shape, tokens.shape[-1])
        return padded.masked_scatter(image_rows[..., None], tokens)

    def _valid_rows(self) -> tuple[Tensor, Tensor]:
        batch, text_width = self.text.shape[:2]
        if self.mask is None:
            valid = self.image.new_ones(batch, text_width + self.image.shape[1], dtype=torch.bool)
        else:
            valid = self.mask.bool()
        return valid[:, :text_width], valid[:, text_width:]


def _check_ids(name: str, ids: Tensor, batch: int, width: int) -> None:
    if tuple(ids.shape) not in ((width, 3), (batch, width, 3)):
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; expected {(width, 3)} or {(batch, width, 3)}.")


def _shared(ids: Tensor) -> bool:
    return ids.ndim == 2 or bool((ids == ids[:1]).all())


def _first(ids: Tensor) -> Tensor:
    return ids if ids.ndim == 2 else ids[0]


def _per_sample(ids: Tensor, batch: int) -> Tensor:
    return ids.expand(batch, -1, -1) if ids.ndim == 2 else ids


def _same_samples(lengths: list[int], ids: Tensor) -> bool:
    return len(set(lengths)) == 1 and _shared(ids.unflatten(0, (len(lengths), -1)))
