"""`qflux train`: from a folder of pictures to a trained edit."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qflux.cli.cache import cache_and_tell
from qflux.cli.checks import check_and_tell
from qflux.cli.fit import AcceptData, fit_and_tell
from qflux.cli.init import (
    ColumnNames,
    ControlNames,
    FamilyName,
    Force,
    MaskName,
    ModelName,
    Prompt,
    Request,
    TargetName,
    wish_of,
    write_config,
)
from qflux.cli.terminal import Overrides, expanded, say, trainer_of
from qflux.errors import ConfigError

if TYPE_CHECKING:
    from qflux.commands import Trainer


def train(
    data: Annotated[
        Path, typer.Argument(help="The folder or the table of your data; or a config (.yaml).", show_default=False)
    ],
    family: FamilyName = None,
    model: ModelName = None,
    output: Annotated[Path | None, typer.Option(help="The config to write. Default: named after the data.")] = None,
    prompt: Prompt = None,
    target: TargetName = None,
    control: ControlNames = None,
    mask: MaskName = None,
    columns: ColumnNames = None,
    force: Force = False,
    accept_data_change: AcceptData = False,
    set_: Overrides = None,
) -> None:
    """Train on your own pictures: a config is written for them, checked, cached, trained on, and reported.

    Run it again after an interruption: it goes on where it was.

    qflux train my_data
    qflux train my_data --model black-forest-labs/FLUX.1-Kontext-dev --prompt "make it night"
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("qflux train is for one process", "with torchrun: init once, then check, cache and fit.")
    path = expanded(data)
    given = {
        "--family": family,
        "--model": model,
        "--output": output,
        "--prompt": prompt,
        "--target": target,
        "--control": control,
        "--mask": mask,
        "--columns": columns,
    }
    if path.suffix.lower() in (".yaml", ".yml") and not path.is_dir():
        unused = [name for name, value in given.items() if value] + (["--force"] if force else [])
        if unused:
            raise ConfigError(f"{unused[0]} is for data, and {data} is a config", "change it there, or with --set.")
        config = path
    else:
        config = expanded(output) if output else Path(f"{_name(path)}.yaml")
        wish = wish_of(prompt, target, control, mask, columns)
        request = Request(path, family, model, config, force)
        if config.exists() and not force:
            _go_on(config, path, request.options(wish))
        else:
            write_config(request, wish)
    trainer = trainer_of(config, set_)
    check_and_tell(trainer, config)
    cache_and_tell(trainer)
    fit_and_tell(trainer, accept_data_change)
    say(f"report: {(trainer.config.run_dir / 'report.html').absolute()}")
    _tell_how_to_use(trainer, config)


def _name(data: Path) -> str:
    """What a config for these data is called."""
    own = data.resolve()
    return re.sub(r"[^\w.-]+", "-", own.stem if own.is_file() else own.name).strip(".-") or "mine"


def _go_on(config: Path, data: Path, options: dict[str, Any]) -> None:
    """There is a config already: it is used as it is, if it is for these data and these options."""
    from qflux.start.writer import shown_data, written_for  # noqa: PLC0415

    known = written_for(config)
    if known is None or known[0] != shown_data(data):
        whose = f"was written for {known[0]}" if known else "was not written by qflux"
        raise ConfigError(f"{config} is there already, and {whose}", "choose another --output.")
    different = [name for name, value in options.items() if value != known[1].get(name)]
    if different:
        name = different[0].removesuffix("s") if different[0] == "controls" else different[0]
        raise ConfigError(
            f"{config} is there already, and --{name} would change it", "edit it, or --force writes it anew."
        )
    say(f"going on with {config}")
    changed = _changed(config, data, known[1])
    if changed:
        say(f"{data} has changed since: {changed}; the same command with --force takes it in")


def _changed(config: Path, data: Path, options: dict[str, Any]) -> str:
    """What is in the folder now and not in the table that was written for it, and the other way round."""
    from qflux.errors import DataError  # noqa: PLC0415
    from qflux.files.jsonl import read_lines  # noqa: PLC0415
    from qflux.start.layouts import TABLE, Wish, discover  # noqa: PLC0415

    table = config.with_name(f"{config.stem}{TABLE}")
    if not table.is_file():
        return ""
    wish = Wish(
        options.get("prompt"),
        options.get("target"),
        tuple(options.get("controls", ())),
        options.get("mask"),
        options.get("columns", {}),
    )
    try:
        now = {row["path_target"] for row in discover(data, wish).rows}
    except DataError:
        return ""
    then = {str(row.get("path_target")) for row in read_lines(table)}
    parts = [f"{len(found)} {what}" for found, what in ((now - then, "new"), (then - now, "gone")) if found]
    return ", ".join(parts) if now else ""


def _tell_how_to_use(trainer: Trainer, config: Path) -> None:
    """The command that edits a picture with what was learnt."""
    from qflux.config import CacheSource  # noqa: PLC0415
    from qflux.data.sources import read_source  # noqa: PLC0415

    adapter = trainer.config.run_dir / "adapter"
    if not adapter.is_dir():
        return
    source = trainer.config.data.training_sources[0]
    examples = [] if isinstance(source, CacheSource) else read_source(source).examples
    words = ["qflux", "predict", str(config), "--lora", str(adapter)]
    words += ["--image", "PHOTO"] * (len(examples[0].controls) if examples else 1)
    words += ["--prompt", examples[0].prompt if examples else "PROMPT"]
    say(f"→ {shlex.join(words)}")
