"""Images as grids of tokens; numbers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence

PIXELS_PER_TOKEN = 16

ImageShape = tuple[int, int, int]
"""`(1, rows, columns)` of an image in tokens; one token is 16 × 16 pixels."""


def token_shape(height: int, width: int) -> ImageShape:
    """The token grid of an image of `height` × `width` pixels."""
    return (1, height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN)


def image_tokens(shapes: Sequence[ImageShape]) -> int:
    """How many tokens these images are together."""
    return sum(frames * rows * columns for frames, rows, columns in shapes)
