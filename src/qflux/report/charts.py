"""Line charts and bars as SVG: no script, no library, readable in print."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qflux.pictures.axis import FEW, Axis, label, ticks
from qflux.report.markup import Html, tag

COLOURS = ("#ea580c", "#2563eb", "#059669", "#9333ea", "#b45309", "#0891b2")
WIDTH, HEIGHT = 620, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 34
MOST_POINTS = 400

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve. A faint one is the raw data behind a smooth one, and is not in the legend."""

    name: str
    points: Points
    colour: str
    faint: bool = False


def line_chart(
    title: str,
    lines: Sequence[Line],
    unit: str = "",
    axis: Callable[[Iterable[float]], Axis] = Axis.linear,
    across: str = "step",
) -> Html | None:
    """Curves over steps, or over what else lies across; nothing if there is nothing to draw."""
    lines = [Line(line.name, _thinned(_finite(line.points)), line.colour, line.faint) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    xs = [x for line in lines for x, _ in line.points]
    up = axis(y for line in lines for _, y in line.points)
    x_range = min(xs), max(xs)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / ((x_range[1] - x_range[0]) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up.share(y) * (HEIGHT - TOP - BOTTOM)

    grid = []
    for y in up.marks:
        _, height = place(x_range[0], y)
        grid.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_number(height), y2=_number(height), class_="grid"))
        grid.append(tag("text", label(y), x=LEFT - 6, y=_number(height + 4), text_anchor="end"))
    for x in ticks(*x_range):
        if x_range[0] <= x <= x_range[1]:
            grid.append(
                tag("text", label(x), x=_number(place(x, up.low)[0]), y=HEIGHT - BOTTOM + 16, text_anchor="middle")
            )
    grid.append(tag("text", across, x=WIDTH - RIGHT, y=HEIGHT - 4, text_anchor="end"))
    curves = [_curve(line, [place(x, y) for x, y in line.points], across) for line in lines]
    drawing = tag(
        "svg",
        *grid,
        *curves,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
        data_values=_values(lines, x_range, across),
    )
    named = [line for line in lines if not line.faint]
    legend = [tag("span", tag("i", style=f"background:{line.colour}"), line.name) for line in named]
    heading = f"{title}, {unit}" if unit else title
    return tag("figure", tag("figcaption", heading), drawing, tag("div", *legend, class_="legend"))


def _values(lines: Sequence[Line], x_range: tuple[float, float], across: str) -> str:
    """What stands under the mouse: where the steps lie, and the values of every curve that has a name."""
    named = [
        {"name": line.name, "colour": line.colour, "points": [[x, float(f"{y:.5g}")] for x, y in line.points]}
        for line in lines
        if not line.faint
    ]
    area = {"left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM}
    return json.dumps(
        {**area, "across": across, "first": x_range[0], "last": x_range[1], "lines": named}, separators=(",", ":")
    )


def _curve(line: Line, points: Points, across: str) -> Html:
    style = {"stroke": line.colour, "class_": "faint" if line.faint else "curve"}
    last = line.points[-1]
    note = tag("title", f"{line.name}: {label(last[1])} at {across} {label(last[0])}")
    marked = points if len(points) <= FEW and not line.faint else []
    marks = [tag("circle", cx=_number(x), cy=_number(y), r=3, fill=line.colour) for x, y in marked]
    path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return tag("g", note, tag("polyline", points=path, fill="none", **style), *marks)


def bars(counts: Sequence[tuple[str, int]]) -> Html:
    """Counts as bars, with their numbers."""
    most = max((count for _, count in counts), default=1) or 1
    rows = [
        tag("tr", tag("th", name), tag("td", str(count)), tag("td", tag("b", style=f"width:{100 * count / most:.1f}%")))
        for name, count in counts
    ]
    return tag("table", *rows, class_="bars")


def smoothed(points: Points) -> list[tuple[float, float]]:
    """The mean of a twentieth of the curve around each point."""
    points = _finite(points)
    reach = len(points) // 40
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    result = []
    for index, (x, _) in enumerate(points):
        first, last = max(0, index - reach), min(len(points), index + reach + 1)
        result.append((x, (sums[last] - sums[first]) / (last - first)))
    return result


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thinned(points: Points) -> Points:
    """About `MOST_POINTS`: of neighbours the lowest and the highest, so that no spike is lost."""
    size = -(-2 * len(points) // MOST_POINTS)
    if size <= 2:
        return points
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    ends = [{min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])} for part in parts]
    return [point for pair in ends for point in sorted(pair)]


def _number(value: float) -> str:
    return f"{value:.1f}"
