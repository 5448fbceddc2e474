"""The commands, and what becomes of their errors."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer
from rich.logging import RichHandler

from qflux.cli.commands.cache import cache_app
from qflux.cli.commands.checks import check, doctor
from qflux.cli.commands.demo import demo
from qflux.cli.commands.export import export
from qflux.cli.commands.fit import fit
from qflux.cli.commands.import_config import import_config
from qflux.cli.commands.init import init
from qflux.cli.commands.inspect import inspect
from qflux.cli.commands.predict import predict
from qflux.cli.commands.report import report
from qflux.cli.commands.schema import schema
from qflux.cli.commands.studio import studio
from qflux.cli.commands.train import train
from qflux.cli.terminal import QUIET, complain, errors, say
from qflux.errors import ConfigError, Interrupted, QfluxError, redacted
from qflux.launch import launched
from qflux.version import VERSION

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


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

    Your own pictures: qflux train FOLDER. A first look, without any: qflux demo.
    """
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose exclude each other", "give one of them.")
    if quiet:
        QUIET.set()
        logging.getLogger().setLevel(logging.ERROR)
    if verbose:
        for name in ("", "qflux", "diffusers"):
            logging.getLogger(name).setLevel(logging.INFO)


for command in (train, studio, demo, init, check, inspect, fit, predict, export, report, doctor, schema, import_config):
    app.command()(command)
app.add_typer(cache_app, name="cache")


# typer brings its own copy of click, depending on its version; its public exceptions lead to the right one.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run(arguments: Sequence[str] | None, is_stopped: Callable[[], bool]) -> None:
    """Run a command and exit. After a signal (`is_stopped`) every error is what the signal has made of it."""
    QUIET.clear()
    _set_up_logging()
    try:
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False) or 0
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (Interrupted, KeyboardInterrupt, typer.Abort) as error:
        interrupted(str(error))
    except Exception as error:
        if is_stopped():  # libraries make other errors of an interruption
            interrupted()
        _explain(error)


def _explain(error: Exception) -> NoReturn:
    """An error of the user's in words; a bug as it is."""
    if isinstance(error, QfluxError):
        complain(type(error).__name__, str(error))
        sys.exit(2)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK_FULL):
        place = f"{error.filename}: " if error.filename else ""
        complain("OSError", f"{place}{error.strerror}\n  → check the path, its permissions and free space.")
        sys.exit(2)
    if isinstance(error, _UsageError):
        if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help already
            error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    raise error


def interrupted(reason: str = "") -> NoReturn:
    complain("interrupted", f"{reason or 'stopped'}; run the same command again to go on from what is saved.")
    sys.exit(130)


def _set_up_logging() -> None:
    """qflux speaks for itself; libraries speak up when something is wrong."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", module="PIL")  # what it warns of, `inspect` finds
    for name, level in (("", logging.WARNING if launched().is_first else logging.ERROR), ("qflux", logging.NOTSET)):
        logging.getLogger(name).setLevel(level)  # another call may have been told --quiet or --verbose
    handler = RichHandler(console=errors, show_time=False, show_path=False)
    handler.addFilter(_without_secrets)
    logging.basicConfig(format="%(message)s", handlers=[handler])
    for name in ("torchao", "torch.utils._pytree", "diffusers"):  # what they say on import is for their developers
        logging.getLogger(name).setLevel(logging.ERROR)


def _without_secrets(record: logging.LogRecord) -> bool:
    record.msg, record.args = redacted(record.getMessage()), None
    return True
