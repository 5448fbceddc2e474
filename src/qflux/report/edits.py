"""The edits of a report: each one through the steps, over its control, with everything else there is to see."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from qflux.report.markup import Html, tag
from qflux.runs.folder import EditHistory, RunFolder

MOST_EDITS, MOST_STEPS, SIDE = 8, 8, 448
"""Edits in a report, pictures of each, and their longer side: a report stays small enough to be sent around."""


def timeline(runs: Sequence[RunFolder]) -> Html:
    """One slider that moves the edits of all runs through the steps."""
    steps = sorted({step for run in runs for edit in _shown(run) for step, _ in edit.outputs})
    return tag(
        "label",
        tag("span", f"after step {steps[-1]}", class_="step"),
        tag(
            "input",
            type="range",
            min=0,
            max=len(steps) - 1,
            value=len(steps) - 1,
            class_="time",
            aria_label="step",
            data_steps=" ".join(map(str, steps)),
        ),
        tag("span", "Drag on a picture to see what it was made from.", class_="hint"),
        class_="timeline",
    )


def edits_of(run: RunFolder) -> Html | None:
    measured = run.measured_edits
    shown = [_edit(edit, measured.get(edit.name, {})) for edit in _shown(run)]
    return tag("div", *shown, class_="edits") if shown else None


def _shown(run: RunFolder) -> list[EditHistory]:
    """Those that changed most of what they should have left alone come first; those that nobody measured, last."""
    measured = run.measured_edits

    def change(edit: EditHistory) -> float:
        found = measured.get(edit.name, {}).get("outside_colour")
        return -float(found) if isinstance(found, int | float) else 1.0

    return sorted(run.edits, key=change)[:MOST_EDITS]


def _in_words(measures: dict[str, Any]) -> str:
    """The measures of an edit in one line."""
    words = {
        "done": lambda share: f"{share:.0%} done",
        "outside_colour": lambda value: f"colours outside {value:.1f}",
        "outside_ssim": lambda value: f"structure outside {value:.3f}",
        "cast": lambda value: f"cast {value:.1f}",
        "blur": lambda value: f"blur {value:+.1f} px",
        "vae_blur": lambda value: f"(the VAE's own {value:+.1f} px)",
    }
    known = {name: measures.get(name) for name in words}
    return " · ".join(words[name](value) for name, value in known.items() if isinstance(value, int | float))


def _edit(edit: EditHistory, measures: dict[str, Any]) -> Html:
    """The output over its control, and beside it everything else there is."""
    chosen = _spread(edit.outputs, MOST_STEPS)
    pictures = [(step, uri) for step, path in chosen if (uri := _picture(path))]
    controls = [uri for path in edit.controls if (uri := _picture(path))]
    before = controls[0] if controls else (pictures[0][1] if pictures else None)
    layers = [
        tag("img", src=uri, class_="after", data_step=step, alt=f"output after step {step}", draggable="false")
        for step, uri in pictures
    ]
    frame = tag(
        "div",
        *layers,
        *([tag("img", src=before, class_="before", alt="control", draggable="false")] if before else []),
        tag("div", class_="handle"),
        class_="frame",
        tabindex=0,
        role="slider",
        aria_label="how much of the control is shown, in per cent",
        aria_valuemin=0,
        aria_valuemax=100,
        aria_valuenow=0,
    )
    ends = tag("figcaption", "output", tag("span", "", class_="when"))
    others = [("control", controls[0])] if controls else []
    others += [(f"control {number}", uri) for number, uri in enumerate(controls[1:], start=2)]
    others += [(name, uri) for name, path in (("mask", edit.mask), ("wanted", edit.wanted)) if (uri := _picture(path))]
    beside = [tag("figure", tag("img", src=uri, alt=name), tag("figcaption", name)) for name, uri in others]
    return tag(
        "article",
        tag("p", tag("b", edit.name), " ", edit.prompt),
        *([tag("p", words, class_="measures")] if (words := _in_words(measures)) else []),
        tag("div", tag("figure", frame, ends, class_="compare"), *beside, class_="pair"),
    )


def _picture(path: Path | None) -> str | None:
    """A small copy of a picture, as a data URI."""
    if path is None:
        return None
    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
    except Exception:  # decoders raise whatever the bytes make them raise
        return None
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=88)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """First, last, and some in between."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]
