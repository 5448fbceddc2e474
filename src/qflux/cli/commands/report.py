"""`qflux report`: one HTML file about a run, or about several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qflux.cli.options import ConfigOption
from qflux.cli.terminal import expanded, say
from qflux.errors import DataError


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of runs: <output_dir>/<run_name>; or their configs.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    output: Annotated[
        Path | None, typer.Option(help="Default: report.html of the run; comparison.html here for several.")
    ] = None,
) -> None:
    """Write a report of a run: curves, edits over time, data, speed, configuration. It needs no network.

    Works while a run goes on, and for one that was killed.

    qflux report runs/flux-kontext
    qflux report runs/rank-16 runs/rank-64 --output comparison.html
    """
    from qflux.config import load_config  # noqa: PLC0415
    from qflux.report.page import write_report  # noqa: PLC0415
    from qflux.runs.paths import RunPaths  # noqa: PLC0415

    given = [expanded(run) for run in (*(runs or []), *([config] if config else []))]
    if not given:
        raise DataError("there is no run", "name its folder, <output_dir>/<run_name>, or its config.")
    folders = [load_config(path).run_dir if path.suffix in (".yaml", ".yml") else path for path in given]
    others = [folder for folder in folders if folder.exists() and not RunPaths(folder).is_run]
    if len(others) < len(folders):  # `runs/*` names the cache as well
        for folder in others:
            say(f"{folder} is left out: it is no run, it has no config.yaml")
        folders = [folder for folder in folders if folder not in others]
    default = RunPaths(folders[0]).report if len(folders) == 1 else Path("comparison.html")
    written = write_report(folders, expanded(output) if output else default)
    say(str(written))
