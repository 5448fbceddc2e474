"""`qflux export`: a trained LoRA in another format, merged into its base, or on the hub."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qflux.cli.options import ConfigFile, ConfigOption, Loras, LoraScales, Overrides, one_config, weighted
from qflux.cli.terminal import expanded, say, trainer_of
from qflux.errors import DataError


class Target(StrEnum):
    """What comes out."""

    diffusers = "diffusers"
    comfyui = "comfyui"
    merged = "merged"


def export(
    file: ConfigFile = None,
    config: ConfigOption = None,
    lora: Loras = None,
    lora_scale: LoraScales = None,
    format_: Annotated[
        Target,
        typer.Option("--format", help="diffusers (PEFT keys), comfyui (kohya keys), or merged: a whole checkpoint."),
    ] = Target.diffusers,
    output: Annotated[
        Path | None, typer.Option(help="A .safetensors file; for merged a folder. Default: exports/ of the run.")
    ] = None,
    push: Annotated[str | None, typer.Option(help="Also upload to this hub repository; HF_TOKEN must be set.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --push: say what would be uploaded.")] = False,
    set_: Overrides = None,
) -> None:
    """Write a LoRA for other programs. Every file is read back and compared before it takes its place.

    qflux export recipes/flux-kontext.yaml --lora runs/flux-kontext/adapter --format comfyui
    """
    from qflux.adapters.publish import upload  # noqa: PLC0415

    trainer = trainer_of(one_config(file, config), set_)
    loras = weighted(lora or [trainer.paths.adapter], lora_scale)
    if dry_run and push is None:
        raise DataError("--dry-run is for --push", "give both or neither.")
    exported = trainer.export(loras, format_.value, expanded(output) if output else None)
    for line in exported.lines:
        say(line)
    if push is not None:
        for line in upload(exported.files, push, dry_run):
            say(line)
