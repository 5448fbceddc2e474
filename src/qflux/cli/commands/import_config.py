"""`qflux import-config`: a config of the original qflux becomes one of this."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qflux.cli.terminal import expanded, say
from qflux.errors import ConfigError


def import_config(
    old: Annotated[Path, typer.Argument(help="A YAML file of the original.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option(help="Where the new one goes. Default: beside it, as <name>-qflux.yaml.")
    ] = None,
) -> None:
    """Convert a config of the original qflux, and say what has no counterpart here.

    qflux import-config face_seg.yaml --output mine.yaml
    """
    import yaml  # noqa: PLC0415

    from qflux.config import load_config  # noqa: PLC0415
    from qflux.config.original import import_original  # noqa: PLC0415
    from qflux.files.atomic import write_bytes  # noqa: PLC0415

    source = expanded(old)
    target = expanded(output or source.with_name(f"{source.stem}-qflux.yaml"))
    if target.exists():
        raise ConfigError(f"{target} is there already", "give another name with --output.")
    imported = import_original(source)
    load_config(imported.values)  # what comes out must be right
    remarks = [*imported.notes, *(f"no counterpart: {path}" for path in imported.missing)]
    head = "".join(f"# {remark}\n" for remark in [f"from {source.name}, a config of the original qflux", *remarks])
    write_bytes(target, (head + yaml.safe_dump(imported.values, sort_keys=False, allow_unicode=True)).encode())
    for remark in remarks:
        say(remark)
    say(f"{target}: {len(imported.missing)} settings without a counterpart. Look at it: qflux check {target}")
