"""`qflux export`: a trained LoRA in another format, merged into its base, or on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qflux.cli.options import ConfigFile, ConfigOption, Loras, LoraScales, Overrides, one_config, takes, weighted
from qflux.cli.terminal import expanded, say, trainer_of
from qflux.errors import DataError


class Target(StrEnum):
    """What comes out."""

    diffusers = "diffusers"
    comfyui = "comfyui"
    merged = "merged"


@dataclass(frozen=True)
class ExportOptions:
    file: ConfigFile = None
    config: ConfigOption = None
    lora: Loras = None
    lora_scale: LoraScales = None
    format_: Annotated[
        Target,
        typer.Option("--format", help="diffusers (PEFT keys), comfyui (kohya keys), or merged: a whole checkpoint."),
    ] = Target.diffusers
    output: Annotated[
        Path | None, typer.Option(help="A .safetensors file; for merged a folder. Default: exports/ of the run.")
    ] = None
    push: Annotated[str | None, typer.Option(help="Also upload to this hub repository; HF_TOKEN must be set.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --push: say what would be uploaded.")] = False
    set_: Overrides = None


@takes(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write a LoRA for other programs. Every file is read back and compared before it takes its place.

    qflux export recipes/flux-kontext.yaml --lora runs/flux-kontext/adapter --format comfyui
    """
    from qflux.adapters.publish import upload  # noqa: PLC0415

    trainer = trainer_of(one_config(options.file, options.config), options.set_)
    loras = weighted(options.lora or [trainer.paths.adapter], options.lora_scale)
    if options.dry_run and options.push is None:
        raise DataError("--dry-run is for --push", "give both or neither.")
    target = expanded(options.output) if options.output else None
    exported = trainer.export(loras, options.format_.value, target)
    for line in exported.lines:
        say(line)
    if options.push is not None:
        for line in upload(exported.files, options.push, options.dry_run):
            say(line)
