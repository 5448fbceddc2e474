"""The padded calling convention of Qwen-Image-2.1, brought to packed tokens and back.

diffusers takes text with places for controls, one for 2 x 2 of their tokens, and images with the target last. All
samples of a batch have one arrangement there; here each may have its own.

Shapes: B samples; P text tokens and places, S image tokens per padded sample; L, N text and image tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.models.padding import Padding, as_bool
from qflux.models.qwen_image21.layout import SLOT, QwenImage21Layout
from qflux.ragged.interleave import Interleave
from qflux.ragged.shapes import ImageShape, Shapes, image_tokens


def is_ordinary(
    image: Tensor,
    text: Tensor,
    img_shapes: Sequence[Sequence[ImageShape]] | None,
    slots: Tensor | None,
    mask: Tensor | None,
) -> bool:
    """A call that diffusers understands as it is: samples of one arrangement, with nothing masked by us."""
    if img_shapes is None or slots is None:
        raise ValueError("img_shapes and img_mask say where the images of a sample stand, and are needed.")
    if mask is not None and not bool(as_bool("attention_mask", mask, _joint_shape(image, text)).all()):
        return False
    alike = len({tuple(map(tuple, shapes)) for shapes in img_shapes}) == 1
    return alike and (len(slots) == 1 or bool((slots == slots[:1]).all()))


def _joint_shape(image: Tensor, text: Tensor) -> tuple[int, int]:
    return len(image), text.shape[1] + image.shape[1]


@dataclass(frozen=True)
class QwenImage21Padding:
    """A padded batch with its padding taken out."""

    image: Tensor
    """`(N, …)`, each sample's target, then its controls."""
    text: Tensor
    """`(L, …)`, without places for images."""
    layout: QwenImage21Layout

    @classmethod
    def of(
        cls,
        image: Tensor,
        text: Tensor,
        img_shapes: Sequence[Sequence[ImageShape]],
        slots: Tensor,
        text_mask: Tensor | None,
        mask: Tensor | None,
    ) -> QwenImage21Padding:
        """From image `(B, S, …)`, text `(B, P, …)`, slots `(B, ≥ P)` and masks `(B, P)`, `(B, P + S)`."""
        if len(img_shapes) != len(image) or len(slots) != len(image):
            raise ValueError(f"{len(image)} samples, {len(img_shapes)} img_shapes and {len(slots)} rows of img_mask.")
        shapes = [Shapes((tuple(own[-1]),), tuple(map(tuple, own[:-1]))) for own in img_shapes]  # type: ignore[arg-type]
        padding = _padding(image, text, shapes, text_mask, mask)
        slots = slots[:, : text.shape[1]].bool()
        valid = padding.text & ~slots
        places = [
            _places(number, sample, own.tolist(), real.tolist())
            for number, (sample, own, real) in enumerate(zip(shapes, slots, valid, strict=True))
        ]
        lengths: list[int] = valid.sum(1).tolist()
        layout = QwenImage21Layout.build(lengths, shapes, places, image.device)
        order = Interleave.build([s.control_tokens for s in shapes], [s.target_tokens for s in shapes], image.device)
        controls, targets = order.split(padding.pack_image(image))
        return cls(layout.images.join(targets, controls), text[valid], layout)

    def unpack(self, output: Tensor) -> Tensor:
        """`(N, C)` as `(B, T, C)`: the target of a sample is the end of its row, the rest is zero."""
        targets, _ = self.layout.images.split(output)
        prefixes, counts = self.layout.lengths
        width = max(before + count for before, count in zip(prefixes, counts, strict=True))
        wanted = torch.arange(width)[None] >= width - torch.tensor(counts)[:, None]
        none = wanted[:, :0].to(output.device)
        return Padding(none, wanted.to(output.device)).unpack_image(targets)


def _padding(
    image: Tensor, text: Tensor, shapes: Sequence[Shapes], text_mask: Tensor | None, mask: Tensor | None
) -> Padding:
    """Which tokens are valid. Without a mask, the images of a sample are the beginning of its row."""
    counts = [sample.tokens for sample in shapes]
    if mask is not None:
        padding = Padding.of(text, image, mask)
    else:
        batch, width = text.shape[:2]
        valid = text.new_ones(batch, width, dtype=torch.bool) if text_mask is None else text_mask
        of_image = torch.arange(image.shape[1], device=image.device)[None] < torch.tensor(counts)[:, None].to(
            image.device
        )
        padding = Padding(as_bool("encoder_hidden_states_mask", valid, (batch, width)), of_image)
    if padding.image_lengths != counts:
        raise ValueError(f"{padding.image_lengths} valid image tokens; img_shapes say {counts}.")
    return padding


def _places(number: int, shapes: Shapes, slots: list[bool], valid: list[bool]) -> list[int]:
    """The text tokens before each control of one sample."""
    wanted = sum(image_tokens([shape]) // SLOT for shape in shapes.controls)
    if sum(slots) != wanted:
        raise ValueError(
            f"sample {number} has {sum(slots)} places in img_mask before its target; its controls need {wanted}."
        )
    starts = [place for place, is_slot in enumerate(slots) if is_slot]
    places, used = list[int](), 0
    for shape in shapes.controls:
        places.append(sum(valid[: starts[used]]))
        used += image_tokens([shape]) // SLOT
    return places
