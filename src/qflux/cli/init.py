"""`qflux init`: a commented config for somebody's data."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qflux.cli.terminal import expanded, progress_bar, say, stages
from qflux.errors import ConfigError

if TYPE_CHECKING:
    from qflux.start.layouts import Wish

Data = Annotated[Path, typer.Argument(help="The folder or the table of your data.", show_default=False)]
FamilyName = Annotated[str | None, typer.Option("--family", help="Default: the family that --model is of.")]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="A folder, a hub id, or small: what ships with qflux. Default: what can run here."),
]
Prompt = Annotated[str | None, typer.Option("--prompt", help="For samples that have no text of their own.")]
TargetName = Annotated[
    str | None,
    typer.Option("--target", help="Which pictures are wanted: a folder, a pattern such as '*_b', or a column."),
]
ControlNames = Annotated[
    list[str] | None, typer.Option("--control", help="Which are to be edited; repeat for further references.")
]
MaskName = Annotated[str | None, typer.Option("--mask", help="Which are masks: white where something is edited.")]
ColumnNames = Annotated[
    list[str] | None, typer.Option("--columns", help="ROLE=NAME of a table: target, control, prompt, mask; repeat.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing config.")]


def init(
    data: Data,
    family: FamilyName = None,
    model: ModelName = None,
    output: Annotated[Path, typer.Option(help="The config to write.")] = Path("qflux.yaml"),
    prompt: Prompt = None,
    target: TargetName = None,
    control: ControlNames = None,
    mask: MaskName = None,
    columns: ColumnNames = None,
    force: Force = False,
) -> None:
    """Look at your data and this machine, and write a commented config for them.

    qflux init my_data
    qflux init my_data --control day --target night --prompt "make it night"
    qflux init my_data/pairs.csv --family qwen-image-edit --output edits.yaml
    """
    wish = wish_of(prompt, target, control, mask, columns)
    write_config(Request(expanded(data), family, model, expanded(output), force), wish)
    say(f"→ qflux train {shlex.quote(str(output))}")


@dataclass(frozen=True)
class Request:
    """What a config is asked for."""

    data: Path
    family: str | None
    model: str | None
    output: Path
    force: bool

    def options(self, wish: Wish) -> dict[str, Any]:
        """Everything that somebody has said besides where the data are; it stands in the config."""
        given = {"family": self.family, "model": self.model, **asdict(wish), "columns": dict(wish.columns)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items() if value}


def wish_of(
    prompt: str | None, target: str | None, control: list[str] | None, mask: str | None, columns: list[str] | None
) -> Wish:
    """What somebody says about their data."""
    from qflux.start.layouts import Wish  # noqa: PLC0415

    if control and target is None:
        raise ConfigError("--control needs --target", "say which pictures are wanted, too.")
    roles: dict[str, str] = {}
    for item in (part for given in columns or [] for part in re.split(r",(?=\w+=)", given)):
        role, found, name = item.partition("=")
        if not found or not name:
            raise ConfigError(f"--columns {item!r} is no ROLE=NAME", "for example --columns target=after.")
        roles[role] = f"{roles[role]},{name}" if role in roles else name
    return Wish(prompt, target, tuple(control or ()), mask, roles)


def write_config(request: Request, wish: Wish) -> None:
    """Find out what there is, write the config (and a table, if the data are none), and say what was understood."""
    from qflux.files.atomic import write_bytes  # noqa: PLC0415
    from qflux.start.layouts import TABLE, discover  # noqa: PLC0415
    from qflux.start.look import look  # noqa: PLC0415
    from qflux.start.machine import this_machine  # noqa: PLC0415
    from qflux.start.presets import choose_model, preset  # noqa: PLC0415
    from qflux.start.writer import Plan, config_text  # noqa: PLC0415

    output, data = request.output, request.data
    if output.suffix.lower() not in (".yaml", ".yml") or not output.name.isprintable():
        raise ConfigError(f"--output {str(output)!r} is no name of a config", "give one that ends in .yaml.")
    machine = this_machine()
    choose_model(request.model, request.family, machine, has_controls=True)  # a wrong name is told at once
    found = discover(data, wish)
    table = output.with_name(f"{output.stem}{TABLE}")
    written = [output, *([table] if found.rows else [])]
    for file in written:
        # Killed between the two, a table is left without its config.
        is_left_over = file == table and not output.exists() and _is_pairs(table)
        if file.is_dir() or (file.exists() and not request.force and not is_left_over):
            raise ConfigError(f"{file} is there already", "choose another --output, or --force.")
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows).encode()
    source = dict(found.source)
    if found.rows:
        source = {"type": "jsonl", "path": str(table), "root": source.get("root", str(data))}
    has_controls = not found.rows or any("path_control" in row for row in found.rows)
    model = choose_model(request.model, request.family, machine, has_controls)
    with progress_bar() as bar:
        listener = stages(bar)
        seen = look(source, rows, model.family, lambda done, total: listener("headers", done, total))
    if not seen.has_controls and has_controls:  # a table without controls is known only now
        model = choose_model(request.model, request.family, machine, has_controls=False)
    plain = "".join(c if c.isalpha() or c.isdecimal() or c in "_.-" else " " for c in output.stem)
    name = "-".join(plain.split()).lstrip(".-") or "run"
    chosen = preset(model, machine, len(seen.samples), seen.sides[-1])
    run_name = name if name != "cache" else "run"
    plan = Plan(data, source, seen, model, machine, chosen, run_name, request.options(wish))
    text = config_text(plan, output)
    if found.rows:
        write_bytes(table, rows)
    write_bytes(output, text.encode())
    say(f"{found.kind}")
    say(str(seen))
    faults = [f"can't be used: {fault}" for fault in seen.faults]
    shown = [*faults[:10], *([f"… and {len(faults) - 10} more"] if len(faults) > 10 else [])]
    for line in [*found.notes, *shown, *([model.why] if model.why else []), *chosen.notes]:
        say(line)
    for file in written:
        say(str(file))


def _is_pairs(table: Path) -> bool:
    """Whether a table was written here."""
    from qflux.files.jsonl import read_lines  # noqa: PLC0415

    return "path_target" in next(read_lines(table), {})
