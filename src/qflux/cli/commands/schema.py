"""`qflux schema`: the configuration for editors and for readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from qflux.cli.terminal import expanded, say


def schema(
    output: Annotated[Path | None, typer.Option(help="A file instead of the terminal.")] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="The reference page (Markdown) instead of JSON Schema.")
    ] = False,
) -> None:
    """Print the JSON Schema of config files, so that editors complete and check them.

    qflux schema --output qflux.schema.json
    """
    from qflux.config import schema as described  # noqa: PLC0415
    from qflux.files.atomic import write_bytes  # noqa: PLC0415

    text = described.reference() if reference else json.dumps(described.json_schema(), indent=2) + "\n"
    if output is None:
        say(text.rstrip("\n"))
    else:
        write_bytes(expanded(output), text.encode())
        say(str(output))
