"""Images as grids of tokens; numbers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PIXELS_PER_TOKEN = 16
"""Height and width in pixels of what one token stands for, in families that do not say otherwise."""

ImageShape = tuple[int, int, int]
"""`(frames, rows, columns)` of an image in tokens; a picture has one frame."""


@dataclass(frozen=True)
class Shapes:
    """The images of a sample as grids of tokens: what the model makes, and what it is shown.

    Their tokens stand in this order: the targets, then the controls.
    """

    targets: tuple[ImageShape, ...]
    controls: tuple[ImageShape, ...] = ()

    @property
    def images(self) -> tuple[ImageShape, ...]:
        """All of them, in the order of their tokens."""
        return self.targets + self.controls

    @property
    def target_tokens(self) -> int:
        return image_tokens(self.targets)

    @property
    def control_tokens(self) -> int:
        return image_tokens(self.controls)

    @property
    def tokens(self) -> int:
        return self.target_tokens + self.control_tokens

    def without_controls(self) -> Shapes:
        return Shapes(self.targets)


def token_shape(height: int, width: int, pixels: int = PIXELS_PER_TOKEN) -> ImageShape:
    """The token grid of an image of `height` × `width` pixels, where a token is `pixels` wide and high."""
    return (1, height // pixels, width // pixels)


def image_tokens(shapes: Sequence[ImageShape]) -> int:
    """How many tokens these images are together."""
    return sum(frames * rows * columns for frames, rows, columns in shapes)
