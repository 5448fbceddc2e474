"""What `qflux inspect` found, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qflux.data.lint.inspect import Inspection

_BAR = 24
_MOST_ROWS = 12
_MOST_OF_A_KIND = 10
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def inspection_tables(inspection: Inspection) -> Iterator[RenderableType]:
    """Sources, distributions, the plan, and the findings."""
    sources = Table("source", "samples", "unusable", "visits per epoch", title="Sources", title_justify="left")
    for source in inspection.sources:
        sources.add_row(escape(source.name), str(source.samples), str(source.faults), f"{source.visits:g}")
    yield sources
    for title, counts in (
        ("Targets by size", inspection.megapixels),
        ("Targets by width / height", inspection.aspects),
        ("Training sizes of targets", inspection.sizes),
        ("Control images per sample", inspection.controls),
    ):
        if counts:
            yield _histogram(title, counts)
    yield _facts(inspection)
    if inspection.findings:
        yield _findings(inspection)
    errors, warnings, notes = (inspection.count(level) for level in ("error", "warning", "note"))
    remark = "; errors stop `cache`, unless data.on_bad_sample is skip" if errors else ""
    yield Text(f"errors: {errors}, warnings: {warnings}, notes: {notes}{remark}.")


def _histogram(title: str, counts: Mapping[str, int]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2))
    most = max(counts.values())
    for label, count in list(counts.items())[:_MOST_ROWS]:
        table.add_row(label, str(count), "█" * max(1 if count else 0, round(_BAR * count / most)))
    if len(counts) > _MOST_ROWS:
        rest = sum(list(counts.values())[_MOST_ROWS:])
        table.add_row(f"{len(counts) - _MOST_ROWS} others", str(rest), "")
    return table


def _facts(inspection: Inspection) -> Table:
    table = Table(title="What will become of it", title_justify="left", box=None, show_header=False, padding=(0, 2))
    table.add_row("train on", f"{inspection.training} samples")
    if inspection.class_images:
        table.add_row("class images", str(inspection.class_images))
    if inspection.held_out:
        table.add_row("held out", f"{inspection.held_out} samples")
    if inspection.tokens:
        spread = ", ".join(f"{name} {count:,}" for name, count in inspection.tokens.items())
        table.add_row("tokens per sample", spread + (" (prompts estimated)" if inspection.text_is_estimated else ""))
    if inspection.steps_per_epoch:
        per_step = f"{inspection.samples_per_step:.1f} samples each"
        table.add_row("steps per epoch", f"{inspection.steps_per_epoch:,}, {per_step}")
        table.add_row("padding avoided", f"{inspection.padding:.1%} of what a padded run would compute")
    return table


def _findings(inspection: Inspection) -> Table:
    table = Table("", "kind", "where", "what", title="Findings", title_justify="left")
    shown: dict[str, int] = {}
    for finding in inspection.findings:
        shown[finding.kind] = shown.get(finding.kind, 0) + 1
        if finding.level == "error" or shown[finding.kind] <= _MOST_OF_A_KIND:
            level = Text(finding.level, style=_STYLES[finding.level])
            table.add_row(level, finding.kind, Text(finding.what, overflow="fold"), Text(finding.detail))
    without_errors = {finding.kind for finding in inspection.findings if finding.level != "error"}
    for kind, count in shown.items():
        if count > _MOST_OF_A_KIND and kind in without_errors:
            table.add_row("", kind, "", f"… and {count - _MOST_OF_A_KIND} more; --json lists them all")
    return table
