"""`qflux init` as a whole: from what somebody asks for to a config on disk, and what there is to say about it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qflux.config import CacheSource, Config
from qflux.data.sources import read_source
from qflux.errors import ConfigError, DataError
from qflux.files.atomic import write_bytes
from qflux.files.jsonl import read_lines
from qflux.runs.paths import RunPaths
from qflux.start.layouts import TABLE, Discovered, Wish, discover
from qflux.start.look import Seen, look
from qflux.start.machine import this_machine
from qflux.start.presets import choose_model, preset
from qflux.start.writer import Plan, config_text, shown_data, written_for


@dataclass(frozen=True)
class Request:
    """What a config is asked for."""

    data: Path
    output: Path
    wish: Wish
    family: str | None = None
    model: str | None = None
    force: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Everything that somebody has said besides where the data are; it stands in the config."""
        wish = self.wish
        given = {"family": self.family, "model": self.model, **asdict(wish), "columns": dict(wish.columns)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in given.items() if value}

    @property
    def table(self) -> Path:
        """Where the table of samples goes, if one has to be written."""
        return self.output.with_name(f"{self.output.stem}{TABLE}")


def wish_of(
    prompt: str | None,
    target: str | None,
    control: Sequence[str] | None,
    mask: str | None,
    columns: Sequence[str] | None,
) -> Wish:
    """What somebody says about their data; `columns` are `ROLE=NAME` of a table."""
    if control and target is None:
        raise ConfigError("--control needs --target", "say which pictures are wanted, too.")
    roles: dict[str, str] = {}
    for item in (part for given in columns or [] for part in re.split(r",(?=\w+=)", given)):
        role, found, name = item.partition("=")
        if not found or not name:
            raise ConfigError(f"--columns {item!r} is no ROLE=NAME", "for example --columns target=after.")
        roles[role] = f"{roles[role]},{name}" if role in roles else name
    return Wish(prompt, target, tuple(control or ()), mask, roles)


def write_config(request: Request, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Find out what there is, write the config (and a table, if the data are none), and say what was understood."""
    output, machine = request.output, this_machine()
    if output.suffix.lower() not in (".yaml", ".yml") or not output.name.isprintable():
        raise ConfigError(f"--output {str(output)!r} is no name of a config", "give one that ends in .yaml.")
    choose_model(request.model, request.family, machine, has_controls=True)  # a wrong name is told at once
    found = discover(request.data, request.wish)
    written = _free_places(request, found)
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows).encode()
    source = dict(found.source)
    if found.rows:
        source = {"type": "jsonl", "path": str(request.table), "root": source.get("root", str(request.data))}
    has_controls = not found.rows or any("path_control" in row for row in found.rows)
    model = choose_model(request.model, request.family, machine, has_controls)
    seen = look(source, rows, model.family, progress)
    if not seen.has_controls and has_controls:  # a table without controls is known only now
        model = choose_model(request.model, request.family, machine, has_controls=False)
    chosen = preset(model, machine, len(seen.samples))
    plan = Plan(request.data, source, seen, model, machine, chosen, _run_name(output), request.options)
    text = config_text(plan, output)
    if found.rows:
        write_bytes(request.table, rows)
    write_bytes(output, text.encode())
    notes = [*found.notes, *_faults(seen), *([model.why] if model.why else []), *chosen.notes]
    return [found.kind, str(seen), *notes, *map(str, written)]


def _free_places(request: Request, found: Discovered) -> list[Path]:
    """The files that will be written; an error if one is there and may not be replaced."""
    files = [request.output, *([request.table] if found.rows else [])]
    for file in files:
        # Killed between the two, a table is left without its config.
        is_left_over = file == request.table and not request.output.exists() and _is_pairs(file)
        if file.is_dir() or (file.exists() and not request.force and not is_left_over):
            raise ConfigError(f"{file} is there already", "choose another --output, or --force.")
    return files


def _is_pairs(table: Path) -> bool:
    """Whether a table was written here."""
    return "path_target" in next(read_lines(table), {})


def _faults(seen: Seen) -> list[str]:
    faults = [f"can't be used: {fault}" for fault in seen.faults]
    return [*faults[:10], *([f"… and {len(faults) - 10} more"] if len(faults) > 10 else [])]


def _run_name(output: Path) -> str:
    plain = "".join(c if c.isalpha() or c.isdecimal() or c in "_.-" else " " for c in output.stem)
    name = "-".join(plain.split()).lstrip(".-") or "run"
    return name if name != "cache" else "run"


def config_name(data: Path) -> Path:
    """What a config for these data is called, where nobody says."""
    own = data.resolve()
    name = re.sub(r"[^\w.-]+", "-", own.stem if own.is_file() else own.name).strip(".-") or "mine"
    return Path(f"{name}.yaml")


def go_on(request: Request) -> list[str]:
    """There is a config already: it is used as it is, if it is for these data and these options."""
    config, data = request.output, request.data
    known = written_for(config)
    if known is None or known[0] != shown_data(data):
        whose = f"was written for {known[0]}" if known else "was not written by qflux"
        raise ConfigError(f"{config} is there already, and {whose}", "choose another --output.")
    different = [name for name, value in request.options.items() if value != known[1].get(name)]
    if different:
        name = different[0].removesuffix("s") if different[0] == "controls" else different[0]
        raise ConfigError(
            f"{config} is there already, and --{name} would change it", "edit it, or --force writes it anew."
        )
    said = [f"going on with {config}"]
    changed = _changed(request, known[1])
    if changed:
        said.append(f"{data} has changed since: {changed}; the same command with --force takes it in")
    return said


def _changed(request: Request, options: dict[str, Any]) -> str:
    """What is in the folder now and not in the table that was written for it, and the other way round."""
    if not request.table.is_file():
        return ""
    wish = Wish(
        options.get("prompt"),
        options.get("target"),
        tuple(options.get("controls", ())),
        options.get("mask"),
        options.get("columns", {}),
    )
    try:
        now = {row["path_target"] for row in discover(request.data, wish).rows}
    except DataError:
        return ""
    then = {str(row.get("path_target")) for row in read_lines(request.table)}
    parts = [f"{len(found)} {what}" for found, what in ((now - then, "new"), (then - now, "gone")) if found]
    return ", ".join(parts) if now else ""


def edit_command(file: Path, config: Config) -> str | None:
    """The command that edits a picture with what a run of this config has learnt; none if it has made no adapter."""
    adapter = RunPaths(config.run_dir).adapter
    if not adapter.is_dir():
        return None
    source = config.data.training_sources[0]
    samples = [] if isinstance(source, CacheSource) else read_source(source).samples
    words = ["qflux", "predict", str(file), "--lora", str(adapter)]
    words += ["--image", "PHOTO"] * (len(samples[0].controls) if samples else 1)
    words += ["--prompt", samples[0].prompt if samples else "PROMPT"]
    return shlex.join(words)
