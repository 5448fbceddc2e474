"""`qflux demo`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskID
from rich.table import Table

from qflux.cli.options import Overrides
from qflux.cli.terminal import LineNowAndThen, console, loading, progress_bar, say, spin_less
from qflux.models.registry import shipped


def demo(
    output: Annotated[Path | None, typer.Option(help="Where everything is written. Default: below runs/.")] = None,
    family: Annotated[str, typer.Option(help="Which family to try.")] = shipped().family,
    set_: Overrides = None,
) -> None:
    """Teach a small model a new edit, offline, in three minutes: data of many sizes, cache, fit, predict, report.

    qflux demo --output /tmp/demo
    """
    spin_less()
    with loading():
        from qflux.demo.run import demo_config, run_demo  # noqa: PLC0415

    started = time.perf_counter()
    default = Path("runs/demo" if family == shipped().family else f"runs/demo-{family}")
    config = demo_config(output or default, set_ or [], family)
    with progress_bar() as bar:
        tasks: dict[str, TaskID] = {}
        logs: dict[str, LineNowAndThen] = {}

        def update(stage: str, done: int, total: int, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, note="")
                logs[stage] = LineNowAndThen()
            bar.update(tasks[stage], completed=done, note=note)
            logs[stage](done, f"{stage} {done}/{total}  {note}")

        summary = run_demo(config, update)

    if summary.resumed_from:
        say(f"continued from step {summary.resumed_from}.")
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("held-out edits are off by", "{:.1f} → {:.1f} of 255, before and after".format(*summary.error))
    table.add_row("held-out loss", "{:.4f} → {:.4f}".format(*summary.held_out_loss))
    table.add_row("padding avoided", f"{summary.padding_avoided:.1%} of what a padded run would compute")
    table.add_row("speed", f"{summary.tokens_per_second:,.0f} tokens per second, {summary.steps} steps")
    sizes = ", ".join(f"{size} ({count})" for size, count in summary.sizes.items())
    table.add_row("samples", f"{summary.samples} in {len(summary.sizes)} sizes: {sizes}")
    table.add_row("time", f"{time.perf_counter() - started:.0f} s")
    console.print(table)
    for what, file in summary.files.items():
        say(f"  {what}: {file}")
    if family != shipped().family:
        say("This family's demo model is tiny and random: the pictures show the path, not what it can do.")
