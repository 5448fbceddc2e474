"""Which files of qflux one training step enters: `python scripts/trace_fit.py`.

A tiny run of one step is traced, call by call, in every thread. The table says how many files and functions each stage
of `Trainer.fit` enters; `--files` lists them. `docs/architecture.md` has the table that this program printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import qflux
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.demo.data import write_data_set
from qflux.models import get_family
from qflux.models.loading import save_checkpoint

ROOT = str(Path(qflux.__file__).parent) + "/"
STAGES = {
    "cache/samples.py:read_samples": "list the samples",
    "cache/samples.py:require_complete": "list the samples",
    "training/fit.py:fit": "put the run together",
    "training/preflight/fitting.py:fitted_to_run": "fit it to the card",
    "training/model.py:TrainedModel._set_up_blocks": "fit it to the card",
    "training/loop.py:Loop._rehearse": "rehearse",
    "training/loop.py:Loop._steps": "the step, and its checkpoint",
    "training/loop.py:Loop._finish": "write the adapter",
    "report/page.py:write_report": "write the report",
}
"""Where a stage begins."""


class Trace:
    """Files and functions that were entered, by stage."""

    def __init__(self) -> None:
        self.entered: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self._stages: list[tuple[CodeType, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(ROOT):
            return
        file, name = code.co_filename.removeprefix(ROOT), code.co_qualname
        if event == "return" and self._stages and self._stages[-1][0] is code:
            self._stages.pop()
        if event != "call":
            return
        begins = STAGES.get(f"{file}:{name}")
        if begins:
            self._stages.append((code, begins))
        if name != "<module>" and not name.endswith(("comp>", "<genexpr>", "<lambda>")):
            stage = self._stages[-1][1] if self._stages else "around it"
            self.entered[stage].add((file, name))


def tiny_run(folder: Path) -> Trainer:
    """A run of one step on twelve samples of six sizes, cached."""
    family = get_family("flux-kontext")
    save_checkpoint(family.tiny(0), folder / "model", family.pipeline)
    write_data_set(folder / "data", count=12, seed=1)
    settings = {
        "output_dir": str(folder / "runs"),
        "model": {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu", "max_sequence_length": 64},
        "data": {
            "path": str(folder / "data"),
            "batch_size": 4,
            "processor": {"multi_resolutions": ["96*96", "128*128", "160*160"]},
        },
        "train": {"max_train_steps": 1, "gradient_checkpointing": False},
    }
    trainer = Trainer(load_config(settings))
    trainer.cache()
    return trainer


def traced() -> Trace:
    """One traced `fit`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer, trace = tiny_run(Path(folder)), Trace()
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            trainer.fit()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files of each stage")
    arguments = parser.parse_args()
    trace = traced()
    print("| stage | files | functions |\n|---|---|---|")
    for stage in (*dict.fromkeys(STAGES.values()), "around it"):
        found = trace.entered[stage]
        print(f"| {stage} | {len({file for file, _ in found})} | {len(found)} |")
        if arguments.files:
            print("\n".join(f"    {file}" for file in sorted({file for file, _ in found})))
    everything = set().union(*trace.entered.values())
    print(f"| all of `fit` | {len({file for file, _ in everything})} | {len(everything)} |")


if __name__ == "__main__":
    main()
