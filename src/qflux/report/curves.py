"""The curves of a report: losses, what edits leave alone, speed and memory, of one run or of several in one chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from qflux.pictures.axis import Axis, falls_far
from qflux.report.charts import COLOURS, Line, line_chart, smoothed
from qflux.report.markup import Html
from qflux.report.values import curve, level_curve
from qflux.runs.folder import RunFolder

LEVELS = ("0 to 0.25, little noise", "0.25 to 0.5", "0.5 to 0.75", "0.75 to 1, mostly noise")

_FIDELITY = (
    ("Colours outside the edited region", "outside_colour", "CIEDE2000; 1 is just visible"),
    ("Structure outside the edited region", "outside_ssim", "SSIM; 1 is the same"),
    ("Colour cast outside the edited region", "cast", "mean change in Lab"),
    ("Mean displacement against the control", "drift", "parts of the image"),
    ("Blur against the wanted image", "blur", "sigma in pixels; below 0 is sharper"),
    ("Share of the edit that is done", "done", "1 is the wanted image"),
)


def loss_charts(runs: Sequence[RunFolder]) -> Iterator[Html | None]:
    # One kind of axis for all: the same distance means the same in every chart.
    curves = [curve(run.steps, "loss") for run in runs] + [curve(run.validations, "held_out_loss") for run in runs]
    levels = {
        run.name: [smoothed(level_curve(run.steps, "loss_by_level", k)) for k in range(len(LEVELS))] for run in runs
    }
    all_levels = [points for found in levels.values() for points in found]
    logarithmic = any(falls_far(y for _, y in points if y > 0) for points in (*curves, *all_levels))
    axis = partial(Axis.for_loss, logarithmic=logarithmic)
    by_level = [y for points in all_levels for _, y in points]
    lines = []
    for run, colour in _coloured(runs):
        raw = curve(run.steps, "loss")
        lines += [
            Line(run.name, raw, colour, faint=True),
            Line(_name(runs, run, "training loss"), smoothed(raw), colour),
        ]
    yield line_chart("Training loss", lines, axis=axis)
    yield validation_chart(runs, "Held-out loss, at fixed noise", "held_out_loss", axis=axis)
    for run in runs:
        title = "Loss by noise level" if len(runs) == 1 else f"Loss by noise level, {run.name}"
        yield line_chart(
            title,
            [Line(level, levels[run.name][k], COLOURS[k]) for k, level in enumerate(LEVELS)],
            axis=lambda values: axis(by_level),
        )
    yield line_chart(
        "Gradient norm",
        [Line(_name(runs, r, "norm"), smoothed(curve(r.steps, "grad_norm")), c) for r, c in _coloured(runs)],
    )
    yield line_chart(
        "Learning rate", [Line(_name(runs, r, "rate"), curve(r.steps, "learning_rate"), c) for r, c in _coloured(runs)]
    )


def noise_charts(runs: Sequence[RunFolder]) -> Iterator[Html | None]:
    """How often which noise level is drawn; of several runs all samples together, in one chart."""
    title = "How often training draws which noise level (0: the image, 1: noise)"
    across = "noise level"
    if len(runs) == 1:
        curves = runs[0].noise_levels.items()
        yield line_chart(title, [Line(n, p, c) for (n, p), c in zip(curves, COLOURS, strict=False)], across=across)
        return
    known = [(run, [*run.noise_levels.values()], colour) for run, colour in _coloured(runs)]
    yield line_chart(title, [Line(run.name, own[-1], colour) for run, own, colour in known if own], across=across)


def validation_chart(
    runs: Sequence[RunFolder],
    title: str,
    key: str,
    unit: str = "",
    axis: Callable[[Iterable[float]], Axis] = Axis.linear,
) -> Html | None:
    lines = [Line(_name(runs, run, title), curve(run.validations, key), colour) for run, colour in _coloured(runs)]
    return line_chart(title, lines, unit, axis)


def fidelity_charts(runs: Sequence[RunFolder]) -> Iterator[Html | None]:
    """What edits of held-out samples do besides the edit, and how much of that is done."""
    for title, key, unit in _FIDELITY:
        yield validation_chart(runs, title, key, unit)


def speed_charts(runs: Sequence[RunFolder]) -> Iterator[Html | None]:
    for title, key in (("Tokens per second", "tokens_per_second"), ("Model-FLOP utilisation", "utilisation")):
        lines = [Line(_name(runs, r, title), smoothed(curve(r.steps, key)), c) for r, c in _coloured(runs)]
        yield line_chart(title, lines)
    lines = [Line(_name(runs, r, "peak memory"), curve(r.steps, "peak_memory_gib"), c) for r, c in _coloured(runs)]
    yield line_chart("Peak memory", lines, "GiB")
    lines = [
        Line(_name(runs, r, "padding avoided"), smoothed(curve(r.steps, "padding_avoided")), c)
        for r, c in _coloured(runs)
    ]
    yield line_chart("Padding avoided", lines, "share of a padded batch")


def _coloured(runs: Sequence[RunFolder]) -> list[tuple[RunFolder, str]]:
    return [(run, COLOURS[k] if k < len(COLOURS) else f"hsl({47 * k % 360}, 65%, 42%)") for k, run in enumerate(runs)]


def _name(runs: Sequence[RunFolder], run: RunFolder, alone: str) -> str:
    return run.name if len(runs) > 1 else alone
