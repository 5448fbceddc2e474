"""A sample as a transformer sees it: embeddings, no files, no pixels.

Shapes: l text tokens; m target tokens and k tokens of one control of a sample; C channels of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from qflux.errors import DataError
from qflux.ragged.shapes import Shapes
from qflux.ragged.transfer import upload


@dataclass(frozen=True)
class Prompt:
    """What the text encoders read; `text_2` goes to the second one, which otherwise reads `text`.

    `images` are those that the text encoder sees, at the size it sees them, in families where it sees any.
    """

    text: str
    text_2: str | None = None
    images: tuple[Image.Image, ...] = ()


@dataclass
class TextLimit:
    """How many tokens a prompt may have, its images not counted, and what becomes of longer ones."""

    tokens: int
    truncate: bool = False
    most: int | None = None
    """What a config may raise `tokens` to."""
    cut: int = 0
    """Prompts that were cut so far."""

    def apply(self, count: int, text: str) -> bool:
        """Note a prompt of `count` tokens: fine, cut (true) and counted, or an error."""
        if count <= self.tokens:
            return False
        if not self.truncate:
            may_be_raised = self.most is None or self.tokens < self.most
            raise DataError(
                f"a prompt of {count} tokens is longer than {self.tokens}: {text[:60]!r}…",
                f"shorten it, {'raise model.max_sequence_length, ' if may_be_raised else ''}"
                "or set model.on_long_prompt: truncate.",
            )
        self.cut += 1
        return True


@dataclass(frozen=True)
class TextEmbedding:
    """An encoded prompt: tokens `(l, channels)` and, where the family has one, a pooled vector `(channels,)`."""

    tokens: Tensor
    pooled: Tensor | None = None
    is_cut: bool = False
    """The prompt was longer than allowed."""
    places: tuple[int, ...] = ()
    """Its tokens before each control, in families that have controls inside the text."""

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> TextEmbedding:
        """The same on another device, and in another dtype if one is given; nothing waits for the copy."""
        pooled = None if self.pooled is None else upload(self.pooled.to(dtype or self.pooled.dtype), device)
        tokens = upload(self.tokens.to(dtype or self.tokens.dtype), device)
        return replace(self, tokens=tokens, pooled=pooled)


class Variant(NamedTuple):
    """What a visit shows of a sample: dropout takes the caption or the controls away."""

    caption: bool = True
    controls: bool = True
    number: int = 0
    """Which of a sample's captions it is, where there are several."""

    @property
    def name(self) -> str:
        dropped = [part for part, kept in (("caption", self.caption), ("controls", self.controls)) if not kept]
        of = f"of caption {self.number + 1} " if self.number else ""
        return of + (f"without {' and '.join(dropped)}" if dropped else "whole")

    @property
    def is_complete(self) -> bool:
        """Nothing is dropped, whichever caption it has."""
        return self.caption and self.controls

    def of_captions(self, count: int) -> list[Variant]:
        """The same for each of so many captions; once, where the caption is dropped."""
        return [self._replace(number=number) for number in range(count if self.caption else 1)]


COMPLETE = Variant()
"""Nothing is dropped."""
NO_CAPTION = Variant(caption=False)


@dataclass(frozen=True)
class EncodedSample:
    """One encoded sample."""

    id: str
    text: TextEmbedding
    target: Tensor
    """`(m, C)` tokens of the image to make."""
    shapes: Shapes
    controls: tuple[Tensor, ...] = ()
    """`(k, C)` tokens of each control."""
    mask: Tensor | None = None
    """`(m,)` in [0, 1]: how much of a target token is edited."""

    def keeping_the_rest(self) -> EncodedSample:
        """With the first control in place of the target outside of the edited region, in tokens that it does not touch.

        The same where there is no region, or no control that lies under the target: dropout may have taken it.
        """
        if self.mask is None or self.shapes.controls[:1] != self.shapes.targets:
            return self
        return replace(self, target=torch.where(self.mask[:, None] > 0, self.target, self.controls[0]))
