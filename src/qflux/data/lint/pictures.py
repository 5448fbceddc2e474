"""Pictures of a data set: what the transforms do to its hardest images, and the tokens of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from qflux.data.images.decode import load_rgb
from qflux.data.lint.inspect import Inspected
from qflux.data.sample import Sample, SampleImage
from qflux.errors import DataError
from qflux.pictures.drawing import FAINT, GAP, INK, MARGIN, PAPER, TARGET, SampleTokens, batch_layout
from qflux.pictures.lettering import draw_text, fitting
from qflux.ragged.shapes import image_tokens

CELL = 260
SHOWN = 10


@dataclass(frozen=True)
class _Hard:
    """An image and how much its transform does to it."""

    image: SampleImage

    @property
    def box(self) -> tuple[float, float, float, float]:
        return self.image.transform.box(*self.image.facts.size)

    @property
    def lost(self) -> float:
        left, top, right, bottom = self.box
        return 1 - (right - left) * (bottom - top) / (self.image.facts.width * self.image.facts.height)

    @property
    def enlarged(self) -> float:
        left, _, right, _ = self.box
        return self.image.transform.size[1] / (right - left)

    @property
    def hardness(self) -> float:
        return 3 * self.lost + max(0.0, self.enlarged - 1) + max(0.0, 0.3 - self.enlarged)


def contact_sheet(samples: Sequence[Sample]) -> Image.Image | None:
    """The images that suffer most, one of a sample: as they are, what is cut off dimmed, and as they train."""
    images = [max(map(_Hard, sample.own_images.all), key=lambda item: item.hardness) for sample in samples]
    hardest = sorted(images, key=lambda item: -item.hardness)[:SHOWN]
    rows = [(item, drawn) for item in hardest if (drawn := _drawn(item))]
    if not rows:
        return None
    line, columns, width = 20, 2, 2 * CELL + 3 * GAP
    tallest = [
        max(image.height for _, pair in rows[i : i + columns] for image in pair) for i in range(0, len(rows), columns)
    ]
    tops = [MARGIN + 30 + sum(tallest[:i]) + i * (2 * line + GAP) for i in range(len(tallest) + 1)]
    canvas = Image.new("RGB", (2 * MARGIN + columns * width, tops[-1] + MARGIN), PAPER)
    pen = ImageDraw.Draw(canvas)
    title = "What the transforms do to the hardest images: as it is, and as it trains"
    draw_text(pen, (MARGIN, MARGIN), title, INK, 15)
    for number, (item, (before, after)) in enumerate(rows):
        left = MARGIN + (number % columns) * width
        top, height = tops[number // columns], tallest[number // columns]
        for offset, image in ((0, before), (CELL + GAP, after)):
            canvas.paste(image, (left + offset, top + height - image.height))
        name, numbers = _caption(item)
        draw_text(pen, (left, top + height + 3), fitting(name, 13, 2 * CELL + GAP), INK, 13)
        draw_text(pen, (left, top + height + line), numbers, FAINT, 13)
    return canvas


def _drawn(item: _Hard) -> tuple[Image.Image, Image.Image] | None:
    try:
        image = load_rgb(item.image.ref)
    except DataError:
        return None
    scale = CELL / max(image.size)
    small = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    left, top, right, bottom = (edge * scale for edge in item.box)
    dim = Image.blend(small, Image.new("RGB", small.size, PAPER), 0.7)
    inside = (round(left), round(top), max(round(left) + 1, round(right)), max(round(top) + 1, round(bottom)))
    dim.paste(small.crop(inside), inside[:2])
    ImageDraw.Draw(dim).rectangle((inside[0], inside[1], inside[2] - 1, inside[3] - 1), outline=TARGET, width=2)
    after = item.image.transform(image)
    scale = CELL / max(after.size)
    return dim, after.resize((max(1, round(after.width * scale)), max(1, round(after.height * scale))))


def _caption(item: _Hard) -> tuple[str, str]:
    height, width = item.image.transform.size
    parts = [f"{item.image.facts.width}x{item.image.facts.height} becomes {width}x{height}", f"{item.lost:.0%} cut off"]
    if item.enlarged > 1.05:
        parts.append(f"enlarged {item.enlarged:.1f}x")
    name = str(item.image.ref)
    return name if len(name) < 72 else "…" + name[-70:], ", ".join(parts)


def batch_picture(inspected: Inspected) -> Image.Image | None:
    """The tokens of one micro-batch to scale: the first of the epoch with several samples."""
    batches = inspected.batches
    first = next(batches, None)
    if first is None:
        return None
    batch = first if len(first) > 1 else next((other for other in batches if len(other) > 1), first)
    return batch_layout([sample_tokens(sample) for sample in batch[:12]])


def sample_tokens(sample: Sample) -> SampleTokens:
    """The token counts of a sample, labelled with its size."""
    height, width = sample.own_images.target.transform.size
    controls = tuple(image_tokens([shape]) for shape in sample.shapes.controls)
    label = f"{width}x{height}, {len(controls)} control{'' if len(controls) == 1 else 's'}"
    return SampleTokens(label, sample.tokens - sample.shapes.tokens, sample.shapes.target_tokens, controls)
