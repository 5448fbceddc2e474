"""What people would rather look at than read: a grid of edits, and the tokens of a batch to scale."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from qflux.files.atomic import write_bytes
from qflux.pictures.axis import FEW, Axis, label, ticks
from qflux.pictures.lettering import draw_text, fitting, text_width

INK, PAPER, FAINT = (34, 40, 49), (255, 255, 255), (120, 128, 138)
TEXT, TARGET, CONTROLS = (148, 163, 184), (234, 88, 12), ((37, 99, 235), (96, 155, 250), (165, 199, 255))
MARGIN, GAP = 16, 10


@dataclass(frozen=True)
class GridRow:
    """One edit: its images by column title, and what was asked for. A column without an image stays empty."""

    caption: str
    images: dict[str, Image.Image]


def edit_grid(rows: Sequence[GridRow], columns: Sequence[str], scale: float = 1.0) -> Image.Image:
    """Edits one below the other, every image at the same scale, so that different sizes look different."""
    heights = [max(round(i.height * scale) for i in row.images.values()) for row in rows]
    widths = [max([90] + [round(row.images[c].width * scale) for row in rows if c in row.images]) for c in columns]
    line = 22
    canvas = Image.new(
        "RGB",
        (
            2 * MARGIN + sum(widths) + GAP * (len(columns) - 1),
            MARGIN + line + sum(h + line + GAP for h in heights) + MARGIN,
        ),
        PAPER,
    )
    pen = ImageDraw.Draw(canvas)
    left = MARGIN
    for title, width in zip(columns, widths, strict=True):
        draw_text(pen, (left, MARGIN), title, INK, 15)
        left += width + GAP
    top = MARGIN + line + 4
    for row, height in zip(rows, heights, strict=True):
        left = MARGIN
        for column, width in zip(columns, widths, strict=True):
            if column in row.images:
                image = row.images[column]
                canvas.paste(
                    image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale)))), (left, top)
                )
            left += width + GAP
        draw_text(pen, (MARGIN, top + height + 3), _caption(row, canvas.width - 2 * MARGIN), FAINT, 13)
        top += height + line + GAP
    return canvas


def _caption(row: GridRow, width: int) -> str:
    """What was asked for, as much of it as fits, and the size."""
    first = next(iter(row.images.values()))
    size = f"  ({first.width}x{first.height})"
    return fitting(row.caption, 13, width - text_width(size, 13)) + size


@dataclass(frozen=True)
class SampleTokens:
    """The token counts of one sample."""

    label: str
    text: int
    target: int
    controls: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.text + self.target + sum(self.controls)


def batch_layout(samples: Sequence[SampleTokens], width: int = 980) -> Image.Image:
    """The tokens of a batch to scale: one bar per sample padded to the longest, and below it the packed sequence."""
    bar, label = 30, 150
    longest, total = max(s.total for s in samples), sum(s.total for s in samples)
    padding = 1 - total / (longest * len(samples))
    packed_scale = (width - 2 * MARGIN) / (longest * len(samples))
    height = 2 * MARGIN + 26 + len(samples) * (bar + 6) + 44 + bar + 30 + 22
    canvas = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(canvas)

    title = f"Padded to the longest sample: {padding:.0%} of the work is on padding"
    draw_text(pen, (MARGIN, MARGIN), title, INK, 15)
    top = MARGIN + 26
    scale = (width - 2 * MARGIN - label) / longest
    for sample in samples:
        draw_text(pen, (MARGIN, top + 7), fitting(sample.label, 13, label - 8), INK, 13)
        end = _segments(pen, sample, MARGIN + label, top, bar, scale)
        _hatched(pen, (end, top, MARGIN + label + longest * scale, top + bar))
        top += bar + 6
    top += 16
    draw_text(pen, (MARGIN, top), "Packed by qflux: one sequence, every token is real", INK, 15)
    top += 26
    left = float(MARGIN)
    for sample in samples:
        left = _segments(pen, sample, left, top, bar, packed_scale)
        pen.line((left, top - 4, left, top + bar + 4), INK, 2)
    end = max(left, MARGIN + longest * len(samples) * packed_scale)  # equal but for rounding if nothing is padded
    pen.rectangle((left, top, end, top + bar), outline=(203, 210, 219))
    note = f"{padding:.0%} not computed"
    draw_text(pen, (width - MARGIN, top + bar + 14), note, FAINT, 13, anchor="ra")
    _legend(pen, top + bar + 14, max(len(s.controls) for s in samples))
    return canvas


def _segments(pen: Any, sample: SampleTokens, left: float, top: int, height: int, scale: float) -> float:
    colours = [TEXT, TARGET, *(CONTROLS[min(i, len(CONTROLS) - 1)] for i in range(len(sample.controls)))]
    for tokens, colour in zip((sample.text, sample.target, *sample.controls), colours, strict=True):
        pen.rectangle((left, top, max(left, left + tokens * scale), top + height), fill=colour)
        left += tokens * scale
    return left


def _hatched(pen: Any, box: tuple[float, float, float, float]) -> None:
    left, top, right, bottom = box
    if right - left < 2:
        return
    height = bottom - top
    for start in range(int(left - height), int(right), 7):
        x0, x1 = max(left, start), min(right, start + height)
        pen.line((x0, bottom - (x0 - start), x1, bottom - (x1 - start)), (214, 219, 226), 1)
    pen.rectangle(box, outline=(203, 210, 219))


def _legend(pen: Any, top: int, controls: int) -> None:
    entries = [("text", TEXT), ("target", TARGET)]
    entries += [(f"control {i + 1}", CONTROLS[min(i, len(CONTROLS) - 1)]) for i in range(controls)]
    left = MARGIN
    for name, colour in entries:
        pen.rectangle((left, top + 3, left + 12, top + 15), fill=colour)
        draw_text(pen, (left + 18, top), name, INK, 13)
        left += 34 + round(text_width(name, 13))


def loss_curves(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], size: tuple[int, int] = (760, 300)
) -> Image.Image:
    """Losses over steps. Where there are few, each one is marked: nothing was measured in between."""
    return _curves(title, lines, size, Axis.for_loss)


def level_densities(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Image.Image | None:
    """How often which noise level is drawn."""
    title = "How often training draws which noise level: 0 is the image, 1 is noise"
    return _curves(title, lines, (760, 300), Axis.linear) if lines else None


def _curves(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    size: tuple[int, int],
    axis: Callable[[Iterable[float]], Axis],
) -> Image.Image:
    lines = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    width, height = size
    left, top, right, bottom = 64, 44, width - MARGIN, height - 56
    xs = [x for points in lines.values() for x, _ in points]
    up = axis(y for points in lines.values() for _, y in points)
    canvas = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(canvas)
    draw_text(pen, (MARGIN, MARGIN), title, INK, 15)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - min(xs)) / ((max(xs) - min(xs)) or 1)
        return left + across * (right - left), bottom - up.share(y) * (bottom - top)

    for y in up.marks:
        _, row = place(min(xs), y)
        pen.line((left, row, right, row), (226, 230, 235), 1)
        draw_text(pen, (left - 8, row), label(y), FAINT, 12, anchor="rm")
    for x in ticks(min(xs), max(xs)):
        if min(xs) <= x <= max(xs):
            draw_text(pen, (place(x, up.low)[0], bottom + 6), label(x), FAINT, 12, anchor="ma")
    legend = left
    for (name, points), colour in zip(lines.items(), (CONTROLS[1], TARGET, INK), strict=False):
        pen.line([place(x, y) for x, y in points], colour, 2, joint="curve")
        for x, y in points if len(points) <= FEW else []:
            pen.circle(place(x, y), 4, colour)
        pen.line((legend, height - 18, legend + 18, height - 18), colour, 3)
        draw_text(pen, (legend + 24, height - 18), name, INK, 13, anchor="lm")
        legend += 50 + round(text_width(name, 13))
    return canvas


def write_png(path: Path, image: Image.Image) -> Path:
    """Write a picture whole or not at all."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    write_bytes(path, buffer.getvalue())
    return path
