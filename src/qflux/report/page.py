"""`report.html`: everything worth knowing about a run, or several side by side, in one file that needs no network."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml
from PIL import Image

from qflux.files.atomic import write_bytes
from qflux.pictures.axis import Axis, falls_far
from qflux.report.charts import COLOURS, Line, bars, line_chart, smoothed
from qflux.report.markup import Html, facts, join, table, tag
from qflux.runs.folder import EditHistory, RunFolder

MOST_EDITS, MOST_STEPS, SIDE = 8, 8, 448
"""Edits in a report, pictures of each, and their longer side: a report stays small enough to be sent around."""
LEVELS = ("0 to 0.25, little noise", "0.25 to 0.5", "0.5 to 0.75", "0.75 to 1, mostly noise")
MOST = 1e150
"""Larger numbers are damage."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""No request leaves the page, whatever is in it."""


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write the report of one run, or of several beside each other."""
    names = Counter(folder.resolve().name for folder in folders)
    runs = [RunFolder(folder, str(folder) if names[folder.resolve().name] > 1 else "") for folder in folders]
    page = report(runs)
    write_bytes(output, page.encode("utf-8", "backslashreplace"))  # names of files may hold what is no character
    return output


def report(runs: Sequence[RunFolder]) -> Html:
    """The page."""
    title = " and ".join(run.name for run in runs)
    own = files("qflux.report")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} – qflux"),
        tag("style", Html(own.joinpath("page.css").read_text(encoding="utf-8"))),
    )
    sections = _sections(runs)
    links = [tag("a", name, href=f"#{_anchor(name)}") for name, _ in sections]
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("nav", *links)),
        tag("main", *(tag("section", tag("h2", name), content, id=_anchor(name)) for name, content in sections)),
        tag("script", Html(own.joinpath("page.js").read_text(encoding="utf-8"))),
    )
    return Html("<!doctype html>" + tag("html", head, body, lang="en"))


def _sections(runs: Sequence[RunFolder]) -> list[tuple[str, Html]]:
    """Titles and contents; a section that has nothing to show is left out."""
    made: list[tuple[str, Html | None]] = [
        ("What differs", _differences(runs) if len(runs) > 1 else None),
        ("Edits", _edits_of(runs)),
        ("Summary", _summary(runs)),
        (
            "Warnings",
            _per_run(runs, lambda run: tag("ul", *(tag("li", w) for w in run.warnings)) if run.warnings else None),
        ),
        ("Loss", _charts(_loss_charts(runs))),
        (
            "Drift",
            _charts([_validation_chart(runs, "Mean displacement against the control", "drift", "parts of the image")]),
        ),
        ("Speed and memory", _charts(_speed_charts(runs))),
        ("Data", _per_run(runs, _data)),
        ("Configuration", _configuration(runs)),
        ("Environment", _per_run(runs, _environment)),
    ]
    return [(name, content) for name, content in made if content is not None]


def _summary(runs: Sequence[RunFolder]) -> Html:
    columns = [_figures(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return table(["", *(run.name for run in runs)] if len(runs) > 1 else (), rows)


def _figures(run: RunFolder) -> dict[str, str]:
    """What there is to say about a run in numbers."""
    config, steps = run.config, run.steps
    found = {"state": run.status}
    if run.last_change:
        found["last step"] = run.last_change.strftime("%Y-%m-%d %H:%M")
    found |= {"family": str(config.get("family")), "model": str(_get(config, "model.pretrained"))}
    if run.adapter:
        found["LoRA"] = str(run.adapter)
    if _get(config, "train.method") != "full" and _get(config, "lora.rank"):
        found["rank"] = f"{_get(config, 'lora.rank')} ({_get(config, 'lora.type')})"
    rate = _get(config, "optimizer.init_args.lr")
    if rate is not None:
        found["learning rate"] = f"{rate} ({_get(config, 'train.lr_scheduler')})"
    measured = [(line["step"], _number(line["held_out_loss"])) for line in run.validations if "held_out_loss" in line]
    if measured:
        ends = ["no number" if loss is None else f"{loss:.4f}" for _, loss in (measured[0], measured[-1])]
        found["held-out loss"] = " → ".join(ends)
        best = min(((loss, step) for step, loss in measured if loss is not None), default=None)
        found["best held-out loss"] = f"{best[0]:.4f} after step {best[1]}" if best else "–"
    if steps:
        tokens, seconds = sum(_values(steps, "tokens")), sum(_values(steps, "seconds"))
        padded = sum(
            n / (1 - share)
            for n, share in ((_number(s.get("tokens")), _number(s.get("padding_avoided"))) for s in steps)
            if n is not None and share is not None and share < 1
        )
        found["steps"] = f"{steps[-1]['step']} of {run.total_steps}"
        found["samples"] = str(run.coverage)
        found["tokens"] = f"{tokens:,.0f}"
        found["padding avoided"] = f"{1 - tokens / padded:.1%} of what a padded run would compute" if padded else "–"
        if speeds := _values(steps, "tokens_per_second"):
            found["tokens per second"] = f"{median(speeds):,.0f}"
        found["time in steps"] = f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"
        waiting = sum(_values(steps, "waiting_seconds"))
        found["of it waiting for data"] = f"{waiting / seconds:.1%}" if seconds else "–"
        if used := _values(steps, "utilisation"):
            found["model-FLOP utilisation"] = f"{fmean(used):.1%}"
        if memory := _values(steps, "peak_memory_gib"):
            found["peak memory"] = f"{max(memory):.1f} GiB"
        left_out = sum(bool(step.get("skipped")) for step in steps)
        if left_out:
            found["steps left out"] = f"{left_out} (loss or gradient was no number)"
    return found


def _loss_charts(runs: Sequence[RunFolder]) -> Iterator[Html | None]:
    # One kind of axis for all: the same distance means the same in every chart.
    curves = [_curve(run.steps, "loss") for run in runs] + [_curve(run.validations, "held_out_loss") for run in runs]
    levels = {run.name: [smoothed(_level(run.steps, "loss_by_level", k)) for k in range(len(LEVELS))] for run in runs}
    all_levels = [points for found in levels.values() for points in found]
    logarithmic = any(falls_far(y for _, y in points if y > 0) for points in (*curves, *all_levels))
    axis = partial(Axis.for_loss, logarithmic=logarithmic)
    by_level = [y for points in all_levels for _, y in points]
    lines = []
    for run, colour in _coloured(runs):
        raw = _curve(run.steps, "loss")
        lines += [
            Line(run.name, raw, colour, faint=True),
            Line(_name(runs, run, "training loss"), smoothed(raw), colour),
        ]
    yield line_chart("Training loss", lines, axis=axis)
    yield _validation_chart(runs, "Held-out loss, at fixed noise", "held_out_loss", axis=axis)
    for run in runs:
        title = "Loss by noise level" if len(runs) == 1 else f"Loss by noise level, {run.name}"
        yield line_chart(
            title,
            [Line(level, levels[run.name][k], COLOURS[k]) for k, level in enumerate(LEVELS)],
            axis=lambda values: axis(by_level),
        )
    yield line_chart(
        "Gradient norm",
        [Line(_name(runs, r, "norm"), smoothed(_curve(r.steps, "grad_norm")), c) for r, c in _coloured(runs)],
    )
    yield line_chart(
        "Learning rate", [Line(_name(runs, r, "rate"), _curve(r.steps, "learning_rate"), c) for r, c in _coloured(runs)]
    )


def _validation_chart(
    runs: Sequence[RunFolder],
    title: str,
    key: str,
    unit: str = "",
    axis: Callable[[Iterable[float]], Axis] = Axis.linear,
) -> Html | None:
    lines = [Line(_name(runs, run, title), _curve(run.validations, key), colour) for run, colour in _coloured(runs)]
    return line_chart(title, lines, unit, axis)


def _speed_charts(runs: Sequence[RunFolder]) -> Iterator[Html | None]:
    for title, key in (("Tokens per second", "tokens_per_second"), ("Model-FLOP utilisation", "utilisation")):
        lines = [Line(_name(runs, r, title), smoothed(_curve(r.steps, key)), c) for r, c in _coloured(runs)]
        yield line_chart(title, lines)
    lines = [Line(_name(runs, r, "peak memory"), _curve(r.steps, "peak_memory_gib"), c) for r, c in _coloured(runs)]
    yield line_chart("Peak memory", lines, "GiB")
    lines = [
        Line(_name(runs, r, "padding avoided"), smoothed(_curve(r.steps, "padding_avoided")), c)
        for r, c in _coloured(runs)
    ]
    yield line_chart("Padding avoided", lines, "share of a padded batch")


def _edits_of(runs: Sequence[RunFolder]) -> Html | None:
    """Every edit through the steps; one slider and one divider move them all."""
    shown = _per_run(runs, _edits)
    if shown is None:
        return None
    steps = sorted({step for run in runs for edit in run.edits[:MOST_EDITS] for step, _ in edit.outputs})
    slider = tag(
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
    return join([slider, shown])


def _edits(run: RunFolder) -> Html | None:
    shown = [_edit(edit) for edit in run.edits[:MOST_EDITS]]
    return tag("div", *shown, class_="edits") if shown else None


def _edit(edit: EditHistory) -> Html:
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
        tag("div", tag("figure", frame, ends, class_="compare"), *beside, class_="pair"),
    )


def _data(run: RunFolder) -> Html | None:
    """Sizes, controls and tokens of the training samples."""
    images = [found for sample in run.samples if (found := _sizes(sample.get("images")))]
    if not images:
        return None
    sizes = Counter(f"{own[0][0]} x {own[0][1]}" for own in images)
    controls = Counter(str(len(own) - 1) for own in images)
    tokens = sorted(sum(width * height // 256 for width, height in own) for own in images)
    spread = {
        "samples": len(images),
        "image tokens, least": tokens[0],
        "median": int(median(tokens)),
        "most": tokens[-1],
    }
    skipped = [tag("li", reason) for reason in run.coverage.skipped[:50]]
    return tag(
        "div",
        facts({**spread, "coverage": run.coverage}),
        tag("h4", "Sizes of targets"),
        bars(sizes.most_common(16)),
        tag("h4", "Controls per sample"),
        bars(sorted(controls.items())),
        *([tag("h4", "Skipped"), tag("ul", *skipped)] if skipped else []),
        class_="data",
    )


def _sizes(value: Any) -> list[tuple[int, int]]:
    """Widths and heights of a sample's images, target first; nothing if they are damaged."""
    pairs = value if isinstance(value, list) else []
    whole = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)]
    return [(width, height) for width, height in whole] if len(whole) == len(pairs) else []


def _configuration(runs: Sequence[RunFolder]) -> Html:
    """The effective configuration."""
    parts: list[Html] = []
    for run in runs:
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        parts.append(tag("details", tag("summary", run.name), tag("pre", text), open=None if len(runs) > 1 else ""))
    return join(parts)


def _differences(runs: Sequence[RunFolder]) -> Html:
    """Settings that are not the same in all runs."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values if key != "run_name"))
    rows = [[k, *(str(v.get(k, "–")) for v in flat)] for k in keys if len({str(v.get(k)) for v in flat}) > 1]
    return table(["", *(run.name for run in runs)], rows) if rows else tag("p", "The settings are the same.")


def _environment(run: RunFolder) -> Html | None:
    known = dict(_flat(run.environment))
    return facts(known) if known else None


def _per_run(runs: Sequence[RunFolder], make: Callable[[RunFolder], Html | None]) -> Html | None:
    made = [(run, content) for run in runs if (content := make(run)) is not None]
    if not made:
        return None
    if len(runs) == 1:
        return made[0][1]
    return tag("div", *(tag("div", tag("h3", run.name), content) for run, content in made), class_="beside")


def _charts(charts: Iterator[Html | None] | Sequence[Html | None]) -> Html | None:
    drawn = [chart for chart in charts if chart is not None]
    return tag("div", *drawn, class_="charts") if drawn else None


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


def _coloured(runs: Sequence[RunFolder]) -> list[tuple[RunFolder, str]]:
    return [(run, COLOURS[k] if k < len(COLOURS) else f"hsl({47 * k % 360}, 65%, 42%)") for k, run in enumerate(runs)]


def _name(runs: Sequence[RunFolder], run: RunFolder, alone: str) -> str:
    return run.name if len(runs) > 1 else alone


def _number(value: Any) -> float | None:
    """A number that can be drawn; metrics write what is none as text."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST < value < MOST:
        return None
    return float(value)


def _values(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [value for line in lines if (value := _number(line.get(key))) is not None]


def _curve(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return _points((line.get("step"), line.get(key)) for line in lines)


def _level(lines: Sequence[dict[str, Any]], key: str, index: int) -> list[tuple[float, float]]:
    found = ((line.get("step"), line.get(key)) for line in lines)
    return _points((step, levels[index]) for step, levels in found if isinstance(levels, list) and index < len(levels))


def _points(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[float, float]]:
    found = ((_number(x), _number(y)) for x, y in pairs)
    return [(x, y) for x, y in found if x is not None and y is not None]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by their dotted names."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield from _flat(item, f"{prefix}.{number}")
    else:
        yield prefix, value


def _get(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
