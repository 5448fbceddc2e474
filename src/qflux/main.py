"""`python -m qflux.main --config FILE --mode cache|fit|predict [--batch_size N] …`: another spelling of `qflux`.

The options of the original qflux are understood too: without `--mode` it is `fit`, `--cache` is `--mode cache`,
`--fit-no-cache` trains without the cache, and `--resume` names what a run does by itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from qflux.cli import main as run


def main(arguments: Sequence[str] | None = None) -> None:
    """Translate older options; everything else goes to the command as it is."""
    parser = argparse.ArgumentParser(prog="python -m qflux.main", description=__doc__)
    parser.add_argument("--config", required=True, help="a YAML file")
    parser.add_argument("--mode", choices=["cache", "fit", "predict"], help="default: fit")
    parser.add_argument("--batch_size", type=int, help="samples in a micro-batch, or edits at once")
    parser.add_argument("--cache", action="store_true", help="the same as --mode cache")
    parser.add_argument("--fit-no-cache", action="store_true", help="--mode fit, encoding every sample when it trains")
    parser.add_argument("--resume", default="", help="not needed: a run goes on from its newest checkpoint")
    known, rest = parser.parse_known_args(arguments)
    mode = known.mode or ("cache" if known.cache else "fit")
    if (known.cache and mode != "cache") or (known.fit_no_cache and mode != "fit"):
        parser.error(f"--{'cache' if known.cache else 'fit-no-cache'} and --mode {mode} exclude each other")
    command = [mode, "--config", known.config, *rest]
    if known.batch_size is not None:
        settings = ["predict.batch_size"] if mode == "predict" else ["data.batch_size"]
        command += ["--set", f"{settings[0]}={known.batch_size}"]
        if mode != "predict":
            command += ["--set", "data.max_tokens=null"]
    if known.fit_no_cache:
        command += ["--set", "cache.use_cache=false"]
    if known.resume:
        _tell_of_resume(parser, Path(known.resume))
    run(command)


def _tell_of_resume(parser: argparse.ArgumentParser, checkpoint: Path) -> None:
    """A checkpoint of this qflux is found without being named; one of the original is of no use here."""
    if not (checkpoint / "manifest.json").is_file():
        parser.error(
            f"--resume {checkpoint}: this is no checkpoint of qflux. A run goes on from its own newest checkpoint, "
            "without an option; a LoRA of the original is used with `qflux predict --lora`."
        )
    sys.stderr.write("--resume is not needed: a run goes on from its newest checkpoint.\n")


if __name__ == "__main__":
    main(sys.argv[1:])
