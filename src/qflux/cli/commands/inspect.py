"""`qflux inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qflux.cli.options import ConfigFile, ConfigOption, Overrides, one_config
from qflux.cli.terminal import console, progress_bar, say, stages, trainer_of


def inspect(
    file: ConfigFile = None,
    config: ConfigOption = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Write everything found to this file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the pictures. Default: inspect/ of the run.")] = None,
    fix: Annotated[
        Path | None,
        typer.Option(help="Write copies to this new folder, with targets moved to where their controls are."),
    ] = None,
    masks: Annotated[Path | None, typer.Option(help="Write masks of what pairs differ in to this new folder.")] = None,
    set_: Overrides = None,
) -> None:
    """Look at the data: what is in it, what will become of it, what is wrong with it.

    qflux inspect recipes/flux-kontext.yaml --json findings.json
    """
    from qflux.cli.tables import inspection_tables  # noqa: PLC0415
    from qflux.data.lint.fix import write_masks, write_registered  # noqa: PLC0415
    from qflux.data.lint.pictures import batch_picture, contact_sheet  # noqa: PLC0415
    from qflux.files.atomic import write_json  # noqa: PLC0415
    from qflux.pictures.drawing import level_densities, write_png  # noqa: PLC0415

    trainer = trainer_of(one_config(file, config), set_)
    with progress_bar() as bar:
        inspected = trainer.inspect(stages(bar))
    for table in inspection_tables(inspected.summary):
        console.print(table)
    if json_:
        write_json(json_.expanduser(), inspected.summary.dump())
    folder = (output or trainer.paths.inspection).expanduser()
    pictures = {
        "contact_sheet.png": contact_sheet(inspected.samples),
        "batch.png": batch_picture(inspected),
        "noise_levels.png": level_densities(trainer.level_curves(inspected.dataset.training)),
    }
    written = [write_png(folder / name, picture) for name, picture in pictures.items() if picture]
    for path in [*written, *([json_] if json_ else [])]:
        say(str(path))
    if fix:
        with progress_bar() as bar:
            fixed = write_registered(inspected.samples, fix.expanduser(), stages(bar))
        moved, unclear = (sum(map(test, fixed)) for test in (lambda one: one.moved, lambda one: one.found is None))
        say(f"{fix}: {len(fixed)} samples, {moved} of them moved, {unclear} could not be compared")
    if masks:
        with progress_bar() as bar:
            made = write_masks(inspected.samples, masks.expanduser(), stages(bar))
        say(f"{masks}: {made} masks")
