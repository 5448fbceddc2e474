"""Options that several commands share, and commands whose options are the fields of a dataclass."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from qflux.cli.terminal import expanded
from qflux.errors import ConfigError, DataError

if TYPE_CHECKING:
    from qflux.adapters.attach import Weighted

T = TypeVar("T")

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="A YAML file; recipes/ has one per family.", show_default=False)
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="The same, as an option.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="path.to.key=value, replaces a value of the config.")
]
Loras = Annotated[
    list[Path] | None, typer.Option("--lora", help="A LoRA file or an adapter folder; repeat for several.")
]
LoraScales = Annotated[
    list[float] | None, typer.Option("--lora-scale", help="Strength of the LoRA; repeat for several, in their order.")
]
AcceptData = Annotated[
    bool, typer.Option("--accept-data-change", help="Go on with a run although its data have changed.")
]


def takes(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """A command of one argument, for typer as if every field of that dataclass were an argument of its own."""

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        hints = get_type_hints(options, include_extras=True)
        parameters = [
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if item.default is MISSING else item.default,
                annotation=hints[item.name],
            )
            for item in fields(options)  # type: ignore[arg-type]
        ]

        def run(**given: Any) -> None:
            command(options(**given))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = hints
        return run

    return decorate


def one_config(file: Path | None, option: Path | None) -> Path:
    """The config of a command, which may be given bare or as `--config`."""
    if file is not None and option is not None and file != option:
        raise ConfigError(f"two configs: {file} and --config {option}", "give one of them.")
    chosen = file or option
    if chosen is None:
        raise ConfigError("there is no config", "name a YAML file; `qflux init FOLDER` writes one for your data.")
    return expanded(chosen)


def weighted(loras: Sequence[Path] | None, scales: Sequence[float] | None) -> list[Weighted]:
    """The LoRAs that a command names, each with its strength."""
    from qflux.adapters.attach import Weighted  # noqa: PLC0415

    paths, weights = list(loras or []), list(scales or [])
    if weights and not paths:
        raise DataError("--lora-scale has no effect without --lora", "give both or neither.")
    if len(weights) not in (0, len(paths)):
        raise DataError(f"{len(paths)} --lora and {len(weights)} --lora-scale", "give a scale for each, or none.")
    if not all(math.isfinite(weight) for weight in weights):
        raise DataError("--lora-scale must be a number")
    return [Weighted(expanded(p), w) for p, w in zip(paths, weights or [1.0] * len(paths), strict=True)]


@dataclass(frozen=True)
class DataOptions:
    """What somebody can say about their data and the model to train, for `init` and `train`."""

    data: Annotated[
        Path, typer.Argument(help="The folder or the table of your data; or a config (.yaml).", show_default=False)
    ]
    family: Annotated[str | None, typer.Option("--family", help="Default: the family that --model is of.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="A folder, a hub id, or small: what ships with qflux. Default: what can run here."
        ),
    ] = None
    output: Annotated[Path | None, typer.Option(help="The config to write. Default: named after the data.")] = None
    prompt: Annotated[str | None, typer.Option("--prompt", help="For samples that have no text of their own.")] = None
    target: Annotated[
        str | None,
        typer.Option("--target", help="Which pictures are wanted: a folder, a pattern such as '*_b', or a column."),
    ] = None
    control: Annotated[
        list[str] | None, typer.Option("--control", help="Which are to be edited; repeat for further references.")
    ] = None
    mask: Annotated[str | None, typer.Option("--mask", help="Which are masks: white where something is edited.")] = None
    columns: Annotated[
        list[str] | None,
        typer.Option("--columns", help="ROLE=NAME of a table: target, control, prompt, mask; repeat."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace an existing config.")] = False
