"""The command line. Commands only parse, show progress and print; the work is in `training.trainer`."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table

from qflux.cli.cache import cache_app
from qflux.cli.checks import check, doctor
from qflux.cli.export import export
from qflux.cli.init import init
from qflux.cli.predict import predict
from qflux.cli.report import report
from qflux.cli.schema import schema
from qflux.cli.terminal import (
    QUIET,
    ConfigFile,
    LineNowAndThen,
    Overrides,
    complain,
    console,
    errors,
    is_first_process,
    progress_bar,
    say,
    stages,
    trainer_of,
)
from qflux.errors import ConfigError, Interrupted, QfluxError
from qflux.version import VERSION

if TYPE_CHECKING:
    from qflux.training.metrics import StepReport

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.add_typer(cache_app, name="cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"qflux {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no warnings.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more; libraries may speak too.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Fine-tune image-editing diffusion transformers on images of different sizes in the same batch.

    A first look, without a GPU: qflux demo. Your own data: qflux init, check, cache, fit, predict.
    """
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose exclude each other", "give one of them.")
    if quiet:
        QUIET.set()
        logging.getLogger().setLevel(logging.ERROR)
    if verbose:
        for name in ("", "qflux", "diffusers"):
            logging.getLogger(name).setLevel(logging.INFO)


@app.command()
def demo(
    output: Annotated[Path | None, typer.Option(help="Where everything is written. Default: below runs/.")] = None,
    family: Annotated[str, typer.Option(help="Which family to try.")] = "flux-kontext",
    set_: Overrides = None,
) -> None:
    """Try everything offline: synthetic data, a small model, cache, fit and predict.

    qflux demo --output /tmp/demo
    """
    from qflux.demo.run import DemoProgress, demo_config, run_demo  # noqa: PLC0415

    started = time.perf_counter()
    default = Path("runs/demo" if family == "flux-kontext" else f"runs/demo-{family}")
    config = demo_config(output or default, set_ or [], family)
    with progress_bar() as bar:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, note="")
            bar.update(tasks[stage], completed=done, note=note)

        summary = run_demo(config, DemoProgress(update))

    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("samples", str(summary.samples))
    table.add_row("sizes", ", ".join(f"{size} ({count})" for size, count in summary.sizes.items()))
    table.add_row("tokens trained on", f"{summary.tokens:,}")
    table.add_row("padding avoided", f"{summary.padding_avoided:.1%} of what a padded run would compute")
    table.add_row("steps", f"{summary.steps}, {summary.tokens_per_second:,.0f} tokens per second")
    table.add_row("held-out loss", "{:.4f} → {:.4f}".format(*summary.held_out_loss))
    table.add_row("held-out edits are off by", "{:.1f} → {:.1f} of 255, before and after".format(*summary.error))
    table.add_row("time", f"{time.perf_counter() - started:.0f} s")
    for number, file in enumerate(summary.files):
        table.add_row("files" if number == 0 else "", escape(str(file)))
    console.print(table)
    if family != "flux-kontext":
        console.print("This family's demo model is tiny and random: the pictures show the path, not what it can do.")


@app.command(name="inspect")
def inspect_(
    config: ConfigFile,
    json_: Annotated[Path | None, typer.Option("--json", help="Write everything found to this file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the pictures. Default: inspect/ of the run.")] = None,
    set_: Overrides = None,
) -> None:
    """Look at the data: what is in it, what will become of it, what is wrong with it.

    qflux inspect --config recipes/flux-kontext.yaml --json findings.json
    """
    from qflux.data.store import write_json  # noqa: PLC0415
    from qflux.report.inspection import batch_picture, contact_sheet  # noqa: PLC0415
    from qflux.report.pictures import write_png  # noqa: PLC0415
    from qflux.report.tables import inspection_tables  # noqa: PLC0415

    trainer = trainer_of(config, set_)
    with progress_bar() as bar:
        inspected = trainer.inspect(stages(bar))
    for table in inspection_tables(inspected.summary):
        console.print(table)
    if json_:
        write_json(json_.expanduser(), inspected.summary.dump())
    folder = (output or trainer.config.run_dir / "inspect").expanduser()
    pictures = {"contact_sheet.png": contact_sheet(inspected.samples.all), "batch.png": batch_picture(inspected)}
    written = [write_png(folder / name, picture) for name, picture in pictures.items() if picture]
    for file in [*written, *([json_] if json_ else [])]:
        say(str(file))


@app.command()
def fit(config: ConfigFile, set_: Overrides = None) -> None:
    """Train on cached samples; goes on where an interrupted run was.

    qflux fit --config recipes/flux-kontext.yaml --set train.max_train_steps=500

    On several GPUs: torchrun --nproc-per-node 8 -m qflux.cli fit --config FILE
    """
    trainer = trainer_of(config, set_)
    with progress_bar() as bar:
        task = bar.add_task("fit", total=None, note="loading")
        log = LineNowAndThen()

        def on_step(report: StepReport) -> None:
            bar.update(task, completed=report.step, total=report.total_steps, note=_progress_note(report))
            log(report.step, f"step {report.step}/{report.total_steps}  {_progress_note(report)}")

        result = trainer.fit(on_step)
    if not is_first_process():
        return
    if result.resumed_from:
        say(f"continued from step {result.resumed_from}.")
    losses = "" if result.first_loss is None else f", loss {result.first_loss:.4f} → {result.last_loss:.4f}"
    held_out = "" if result.held_out_loss is None else f", held-out loss {result.held_out_loss:.4f}"
    what = "transformer" if result.adapter.is_dir() else "LoRA"
    say(f"{result.steps} steps{losses}{held_out}. {result.coverage}. {what}: {result.adapter}")
    if result.best:
        folder = trainer.config.run_dir / "best"
        use = f"; its adapter: {folder}" if folder.is_dir() else ""
        say(f"best checkpoint by held-out loss ({result.best[1]:.4f}): {result.best[0]}{use}")
    if result.skipped_steps:
        say(f"{result.skipped_steps} steps were left out: their loss or gradient was no number (see metrics.jsonl).")
    for skipped in result.coverage.skipped[:20]:
        say(f"skipped: {skipped}")
    if len(result.coverage.skipped) > 20:
        say(f"… and {len(result.coverage.skipped) - 20} more, in {trainer.config.run_dir / 'ledger.jsonl'}")


def _progress_note(report: StepReport) -> str:
    parts = [f"loss {report.loss:.4f}", f"{report.tokens_per_second:,.0f} tokens/s"]
    if report.utilisation is not None:
        parts.append(f"{report.utilisation:.0%} MFU")
    if report.peak_memory_gib is not None:
        parts.append(f"{report.peak_memory_gib:.1f} GiB")
    if report.waiting_seconds > 0.1 * report.seconds:
        parts.append(f"{report.waiting_seconds / report.seconds:.0%} waiting for data")
    return "  ".join(parts)


app.command(name="predict")(predict)
app.command(name="export")(export)
app.command(name="report")(report)
app.command(name="init")(init)
app.command(name="check")(check)
app.command(name="doctor")(doctor)
app.command(name="schema")(schema)


# typer brings its own copy of click, depending on its version; its public exceptions lead to the right one.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Exit code 0: done, 2: the input is wrong, 130: interrupted, 1: a bug."""
    QUIET.clear()
    _set_up_logging()
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False) or 0
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except QfluxError as error:
        complain(type(error).__name__, str(error))
        sys.exit(2)
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        place = f"{error.filename}: " if error.filename else ""
        complain("OSError", f"{place}{error.strerror}\n  → check the path, its permissions and free space.")
        sys.exit(2)
    except _UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help already
            error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt, typer.Abort) as error:
        complain("interrupted", f"{str(error) or 'stopped'}; run the same command again to go on from what is saved.")
        sys.exit(130)


def _set_up_logging() -> None:
    """qflux speaks for itself; libraries speak up when something is wrong."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", module="PIL")  # what it warns of, `inspect` finds
    for name, level in (("", logging.WARNING if is_first_process() else logging.ERROR), ("qflux", logging.NOTSET)):
        logging.getLogger(name).setLevel(level)  # another call may have been told --quiet or --verbose
    handler = RichHandler(console=errors, show_time=False, show_path=False)
    logging.basicConfig(format="%(message)s", handlers=[handler])
    for name in ("torchao", "torch.utils._pytree", "diffusers"):  # what they say on import is for their developers
        logging.getLogger(name).setLevel(logging.ERROR)
