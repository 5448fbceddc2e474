"""How a sample of Qwen-Image-2.1 is one sequence: controls inside the text, then its targets.

A token sees what came before it; a token of an image also sees the rest of its image. So text and controls, the prefix,
see no target, and several targets can stand behind one prefix: each sees the prefix and itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qflux.models.qwen_image21.facts import MOST_POSITIONS, MOST_ROWS
from qflux.ragged.shapes import ImageShape, Shapes, image_tokens
from qflux.ragged.spans import Arrangement, Span


class _Part(NamedTuple):
    """Tokens that follow one another: of the text, or an image."""

    first: int
    """Among the sample's text tokens, or among its image tokens."""
    tokens: int
    image: ImageShape | None = None
    is_target: bool = False


def _parts(text: int, shapes: Shapes, places: Sequence[int]) -> Iterator[_Part]:
    """The parts of a sample in their order. Image tokens are counted as they come in: targets first."""
    if len(places) != len(shapes.controls) or list(places) != sorted(places) or not all(0 <= p <= text for p in places):
        raise ValueError(f"{len(shapes.controls)} controls in {text} text tokens can't stand at the places {places}.")
    done, image = 0, shapes.target_tokens
    for place, shape in zip(places, shapes.controls, strict=True):
        if place > done:
            yield _Part(done, place - done)
        yield _Part(image, image_tokens([shape]), shape)
        done, image = place, image + image_tokens([shape])
    if text > done:
        yield _Part(done, text - done)
    image = 0
    for shape in shapes.targets:
        yield _Part(image, image_tokens([shape]), shape, is_target=True)
        image += image_tokens([shape])


def arrange(text: int, shapes: Shapes, places: Sequence[int]) -> Arrangement:
    """The joint sequence of a sample with so many text tokens, and what sees what in it."""
    order, spans, start, prefix = list[Tensor](), list[Span](), 0, text + shapes.control_tokens
    for part in _parts(text, shapes, places):
        end = start + part.tokens
        order.append(torch.arange(part.first, part.first + part.tokens) + (text if part.image else 0))
        # Behind the first target, what came before is the prefix, and other targets that it must not see.
        keys = ((0, prefix), (start, end)) if part.is_target and start > prefix > 0 else ((0, end),)
        keys = ((start, end),) if part.is_target and not prefix else keys
        spans.append(Span((start, end), keys, causal=part.image is None))
        start = end
    return Arrangement(torch.cat(order), tuple(spans))


def pairs_of(text: int, shapes: Shapes) -> int:
    """Pairs of tokens of which one sees the other. Where in the text a control stands makes next to no difference."""
    return sum(span.pairs for span in arrange(text, shapes, [0] * len(shapes.controls)).spans)


def positions(text: int, shapes: Shapes, places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Numbers of rotary positions (frame, row, column): `(l, 3)` of text tokens, `(n, 3)` of image tokens.

    Text counts on along all three. An image stands still in the first and has its rows and columns around zero; what
    follows it goes on behind its longer side. All targets stand where the only one would.
    """
    of_text, of_image = torch.empty(text, 3, dtype=torch.long), torch.empty(shapes.tokens, 3, dtype=torch.long)
    reached = 0
    for part in _parts(text, shapes, places):
        here = slice(part.first, part.first + part.tokens)
        if part.image is None:
            of_text[here] = torch.arange(reached, reached + part.tokens)[:, None]
            reached += part.tokens
            continue
        _, rows, columns = part.image
        axes = ([reached], *(range(side // 2 - side, side // 2) for side in (rows, columns)))
        of_image[here] = torch.cartesian_prod(*(torch.tensor(list(axis)) for axis in axes))
        if max(rows, columns) > MOST_ROWS:
            raise ValueError(f"an image of {rows} x {columns} tokens is larger than {MOST_ROWS} a side.")
        reached += 0 if part.is_target else max(rows, columns)
    if reached >= MOST_POSITIONS:
        raise ValueError(f"a sample needs {reached + 1} positions; there are {MOST_POSITIONS}.")
    return of_text, of_image
