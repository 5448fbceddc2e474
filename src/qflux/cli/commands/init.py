"""`qflux init`: a commented config for somebody's data."""

from __future__ import annotations

import shlex
from pathlib import Path

from qflux.cli.options import DataOptions, takes
from qflux.cli.terminal import expanded, progress_bar, say, stages
from qflux.errors import ConfigError


@takes(DataOptions)
def init(options: DataOptions) -> None:
    """Look at your data and this machine, and write a commented config for them.

    qflux init my_data
    qflux init my_data --control day --target night --prompt "make it night"
    qflux init my_data/pairs.csv --family qwen-image-edit --output edits.yaml
    """
    output = options.output or Path("qflux.yaml")
    write_and_tell(options, expanded(output))
    say(f"→ qflux train {shlex.quote(str(output))}")


def write_and_tell(options: DataOptions, output: Path, may_go_on: bool = False) -> None:
    """Write a config and say what was understood; or go on with one that is there, if that may be."""
    from qflux.start.request import Request, go_on, wish_of, write_config  # noqa: PLC0415

    data = expanded(options.data)
    if data.suffix.lower() in (".yaml", ".yml") and data.is_file():
        raise ConfigError(f"{data} is a config already", f"train with it: qflux train {shlex.quote(str(data))}")
    wish = wish_of(options.prompt, options.target, options.control, options.mask, options.columns)
    request = Request(data, output, wish, options.family, options.model, options.force)
    if may_go_on and output.exists() and not options.force:
        lines = go_on(request)
    else:
        with progress_bar() as bar:
            listener = stages(bar)
            lines = write_config(request, lambda done, total: listener("headers", done, total))
    for line in lines:
        say(line)
