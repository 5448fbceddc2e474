"""`python -m qflux.main --config FILE --mode cache|fit|predict [--batch_size N] …`: another spelling of `qflux`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from qflux.cli import main as run


def main(arguments: Sequence[str] | None = None) -> None:
    """Translate `--mode` and `--batch_size`; everything else goes to the command as it is."""
    parser = argparse.ArgumentParser(prog="python -m qflux.main", description=__doc__)
    parser.add_argument("--config", required=True, help="a YAML file")
    parser.add_argument("--mode", required=True, choices=["cache", "fit", "predict"])
    parser.add_argument("--batch_size", type=int, help="overrides data.batch_size")
    known, rest = parser.parse_known_args(arguments)
    command = [known.mode, "--config", known.config, *rest]
    if known.batch_size is not None:
        command += ["--set", f"data.batch_size={known.batch_size}"]
    run(command)


if __name__ == "__main__":
    main(sys.argv[1:])
