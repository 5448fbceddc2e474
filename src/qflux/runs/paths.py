"""Every file of a run, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qflux.adapters.file_names import FILE_NAME


@dataclass(frozen=True)
class RunPaths:
    """The places of a run's files, below `<output_dir>/<run_name>/`."""

    root: Path

    @property
    def config(self) -> Path:
        """The effective configuration; a folder with one is a run."""
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def fitting(self) -> Path:
        """How the run was fitted to its card."""
        return self.root / "fitting.json"

    @property
    def noise_levels(self) -> Path:
        """How often which noise level is drawn."""
        return self.root / "noise_levels.json"

    @property
    def metrics(self) -> Path:
        """A line per optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def validation(self) -> Path:
        """A line per validation."""
        return self.root / "validation.jsonl"

    @property
    def ledger(self) -> Path:
        """Which samples trained when."""
        return self.root / "ledger.jsonl"

    @property
    def warnings(self) -> Path:
        return self.root / "warnings.jsonl"

    @property
    def samples(self) -> Path:
        """Edits drawn at the checkpoints."""
        return self.root / "samples"

    def sample_sheet(self, steps_done: int) -> Path:
        """All edits of a checkpoint side by side."""
        return self.samples / f"{_step(steps_done)}.png"

    def sample_folder(self, steps_done: int) -> Path:
        """Each output of a checkpoint by itself, and `edits.json`."""
        return self.samples / _step(steps_done)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, steps_done: int) -> Path:
        return self.checkpoints / _step(steps_done)

    @property
    def adapter(self) -> Path:
        """The folder of the finished adapter."""
        return self.root / "adapter"

    @property
    def adapter_file(self) -> Path:
        return self.adapter / FILE_NAME

    @property
    def best(self) -> Path:
        """The folder of the adapter with the lowest held-out loss."""
        return self.root / "best"

    @property
    def transformer(self) -> Path:
        """What a full fine-tuning writes instead of an adapter."""
        return self.root / "transformer"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    @property
    def inspection(self) -> Path:
        """Pictures of `qflux inspect`."""
        return self.root / "inspect"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def is_run(self) -> bool:
        """Whether a run has been started here."""
        return self.config.is_file()


def _step(steps_done: int) -> str:
    return f"step-{steps_done:08d}"


def steps_of(path: Path) -> int | None:
    """The number of steps that the name of a checkpoint or of a folder of samples says; none if it is neither."""
    digits = path.name.removeprefix("step-")
    return int(digits) if digits != path.name and digits.isdigit() else None
