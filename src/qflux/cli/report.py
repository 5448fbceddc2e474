"""`qflux report`: one HTML file about a run, or about several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qflux.cli.terminal import expanded, say


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs: <output_dir>/<run_name>.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option(help="Default: report.html of the run; comparison.html here for several.")
    ] = None,
) -> None:
    """Write a report of a run: curves, edits over time, data, speed, configuration. It needs no network.

    Works while a run goes on, and for one that was killed.

    qflux report runs/flux-kontext
    qflux report runs/rank-16 runs/rank-64 --output comparison.html
    """
    from qflux.report.page import write_report  # noqa: PLC0415

    folders = [expanded(run) for run in runs]
    default = folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html")
    written = write_report(folders, expanded(output) if output else default)
    say(str(written))
