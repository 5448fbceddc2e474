"""`qflux studio`: a page for data, runs and edits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from qflux.cli.terminal import expanded, say


def studio(
    folder: Annotated[Path, typer.Argument(help="Your pictures, or a folder with data and runs.")] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Beyond this machine only with a password: QFLUX_STUDIO_PASSWORD.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in a browser.")] = True,
    demo: Annotated[bool, typer.Option("--demo", help="Make the demo's pairs in FOLDER first.")] = False,
) -> None:
    """Look at pairs, start runs, watch them learn, try edits: a page on this machine.

    qflux studio my_data
    """
    from qflux.studio.opening import Opening, serve  # noqa: PLC0415

    if demo:
        from qflux.demo.night import ensure_night_set  # noqa: PLC0415

        ensure_night_set(expanded(folder) / "data")
    serve(Opening(expanded(folder), port, host, os.environ.get("QFLUX_STUDIO_PASSWORD") or None, browser), say)
