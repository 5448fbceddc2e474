"""`report.html`: everything worth knowing about a run, or several side by side, in one file that needs no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from qflux.files.atomic import write_bytes
from qflux.report.curves import fidelity_charts, loss_charts, noise_charts, speed_charts
from qflux.report.edits import edits_of, timeline
from qflux.report.facts import configuration, data_of, differences, environment_of, summary
from qflux.report.markup import Html, join, tag
from qflux.runs.folder import RunFolder

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
        ("What differs", differences(runs) if len(runs) > 1 else None),
        ("Edits", _edits(runs)),
        ("Summary", summary(runs)),
        (
            "Warnings",
            _per_run(runs, lambda run: tag("ul", *(tag("li", w) for w in run.warnings)) if run.warnings else None),
        ),
        ("Loss", _charts(loss_charts(runs))),
        ("What edits leave alone", _charts(fidelity_charts(runs))),
        ("Noise levels", _charts(noise_charts(runs))),
        ("Speed and memory", _charts(speed_charts(runs))),
        ("Data", _per_run(runs, data_of)),
        ("Configuration", configuration(runs)),
        ("Environment", _per_run(runs, environment_of)),
    ]
    return [(name, content) for name, content in made if content is not None]


def _edits(runs: Sequence[RunFolder]) -> Html | None:
    """Every edit through the steps; one slider and one divider move them all."""
    shown = _per_run(runs, edits_of)
    return None if shown is None else join([timeline(runs), shown])


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


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
