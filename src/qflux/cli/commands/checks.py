"""`qflux check` and `qflux doctor`: what would go wrong, said before it does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from qflux.cli.options import ConfigFile, ConfigOption, Overrides, one_config
from qflux.cli.terminal import amount, console, progress_bar, say, stages, trainer_of
from qflux.errors import ConfigError, QfluxError

if TYPE_CHECKING:
    from qflux.commands import Trainer
    from qflux.training.preflight.check import Check

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
_MARKS = {
    "ok": ("ok", "green"),
    "warning": ("note", "yellow"),
    "error": ("wrong", "bold red"),
    "unknown": ("?", "cyan"),
}


def check(
    file: ConfigFile = None,
    config: ConfigOption = None,
    set_: Overrides = None,
    memory: Annotated[
        str | None, typer.Option(help="Plan for a GPU with so much memory, such as 24GB; none has to be here.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Check everything about a run that needs no weights: settings, data, plan, memory, layers, disk, cache.

    Exit code 0: nothing is wrong, 2: something is.

    qflux check recipes/flux-kontext.yaml --set data.path=my_data
    """
    from qflux.config import load_config  # noqa: PLC0415

    config = one_config(file, config)
    set_ = [*(set_ or []), *([f"memory={memory}"] if memory else [])]
    try:
        load_config(config, set_)  # before anything heavy is imported
    except QfluxError as error:
        if json_:
            wrong_config = {"what": "configuration", "state": "error", "detail": error.problem, "remedy": error.remedy}
            say(json.dumps({"ok": False, "checks": [wrong_config]}, indent=2))
        raise
    from qflux.training.preflight.check import Check  # noqa: PLC0415

    found: list[Check] = []
    try:
        try:
            trainer = trainer_of(config, set_)
        except ConfigError as error:
            if not error.problem.startswith("model.device"):
                raise
            found.append(Check("device", "error", error.problem, error.remedy))
            trainer = trainer_of(config, [*set_, "model.device=cpu"])  # everything else can be looked at
        with progress_bar() as bar:
            found += trainer.check(stages(bar))
    except QfluxError as error:
        if json_:
            found.append(Check("configuration", "error", error.problem, error.remedy))
            say(json.dumps({"ok": False, "checks": [asdict(item) for item in found]}, indent=2))
        raise
    wrong = [item for item in found if item.state == "error"]
    if json_:
        say(json.dumps({"ok": not wrong, "checks": [asdict(item) for item in found]}, indent=2))
    else:
        _show(found)
    _require_right(wrong, config)


def check_and_tell(trainer: Trainer, config: Path) -> None:
    """The same before a run; what the run is about to do anyway is not mentioned."""
    with progress_bar() as bar:
        found = list(trainer.check(stages(bar)))
    _show([item for item in found if item.state in ("ok", "error") or item.what != "cache"])
    _require_right([item for item in found if item.state == "error"], config)


def _show(found: Sequence[Check]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for item in found:
        mark, style = _MARKS[item.state]
        text = item.detail + (f"\n→ {item.remedy}" if item.remedy else "")
        table.add_row(Text(mark, style=style), item.what, Text(text, overflow="fold"))
    console.print(table)


def _require_right(wrong: Sequence[Check], config: Path) -> None:
    if wrong:
        many = "one thing is" if len(wrong) == 1 else f"{len(wrong)} things are"
        raise QfluxError(f"{many} wrong with {config}", "fix that, and check again.")


def doctor(json_: AsJson = False) -> None:
    """Show what qflux runs on: versions, devices, attention kernels, and what is missing.

    qflux doctor
    qflux doctor --json > machine.json
    """
    from huggingface_hub import get_token  # noqa: PLC0415
    from huggingface_hub.constants import HF_HUB_OFFLINE  # noqa: PLC0415

    from qflux.runs.environment import OPTIONAL, attention_backends, environment, version  # noqa: PLC0415

    found: dict[str, Any] = environment()
    found["attention"] = attention_backends()
    found["optional"] = {name: version(name) for name in OPTIONAL}
    found["free_disk_bytes"] = shutil.disk_usage(Path.cwd()).free
    found["hub_token"] = get_token() is not None
    found["offline"] = HF_HUB_OFFLINE
    if json_:
        say(json.dumps(found, indent=2))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("qflux", f"{found['qflux']}, Python {found['python']}, {found['system']}")
    for name, number in found["packages"].items():
        table.add_row(name, number or Text("missing", style="bold red"))
    gpus = [f"{gpu['name']}, {gpu['memory_gib']} GiB, capability {gpu['capability']}" for gpu in found["devices"]]
    cuda = f"CUDA {found['cuda']}" if found["cuda"] else "this build of torch has no CUDA"
    table.add_row("devices", "\n".join(gpus) or f"no GPU ({cuda}); {found['cpu_threads']} CPU threads")
    table.add_row("attention", ", ".join(name for name, there in found["attention"].items() if there))
    table.add_row("free disk here", amount(found["free_disk_bytes"]))
    login = "there is one" if found["hub_token"] else "none; gated models need HF_TOKEN or `hf auth login`"
    table.add_row("hub token", login)
    if found["offline"]:
        table.add_row("HF_HUB_OFFLINE", "set: nothing is downloaded")
    missing = [name for name, number in found["optional"].items() if number is None]
    for name in missing:
        source, purpose = OPTIONAL[name]
        table.add_row(f"no {name}", Text(f"{purpose}; {source}"))
    console.print(table)
