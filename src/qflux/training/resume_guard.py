"""What a continued run must share with the one it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qflux.config import Config
from qflux.files.hashing import key_of
from qflux.runs.ledger import read_ledger
from qflux.training.encode import TrainingSample

_PATH_KEYS = (
    "method",
    "max_grad_norm",
    "lr_scheduler",
    "lr_warmup_steps",
    "lr_num_cycles",
    "lr_power",
    "lr_step_rules",
    "ema",
    "guidance",
    "caption_dropout",
    "control_dropout",
)
NOISE_SHIFT = "noise schedule"
"""The shift that a run draws its noise levels with; runs of before 0.1.0 have none recorded."""
DATA = "data (samples)"
STEPS = "train.max_train_steps"
_LENGTH_MATTERS = ("linear", "cosine", "cosine_with_restarts", "polynomial")
"""Schedules that end where the run does."""


def path_settings(config: Config, total: int) -> dict[str, object]:
    """What decides where training goes, besides the data."""
    values = config.dump()
    sections = {name: values[name] for name in ("family", "optimizer", "loss")}
    if config.train.method == "lora":
        sections["lora"] = {key: value for key, value in values["lora"].items() if key != "init_from"}
    for key in ("pretrained", "transformer", "dtype", "quantization", "max_sequence_length"):
        sections[f"model.{key}"] = values["model"][key]
    sections["data.processor"] = values["data"]["processor"]
    for key in _PATH_KEYS:
        sections[f"train.{key}"] = values["train"][key]
    if config.train.lr_scheduler in _LENGTH_MATTERS:
        sections[STEPS] = total
    return sections


def planned_steps(before: Mapping[str, Any] | None) -> int | None:
    """For how many steps the schedule of the run so far was made, if its schedule depends on that."""
    steps = before["settings"].get(STEPS) if before is not None else None
    return int(steps) if isinstance(steps, int) else None


def data_identity(config: Config, samples: Sequence[TrainingSample], world_size: int) -> dict[str, object]:
    """What decides the plan: the samples, how often each trains, and how many make a step.

    Four micro-batches in one process and two in each of two are the same step.
    """
    content = sorted((sample.address, sample.example.rate, sample.example.is_prior) for sample in samples)
    return {
        "seed": config.seed,
        "data.batch_size": config.data.batch_size,
        "data.max_tokens": config.data.max_tokens,
        "micro-batches in a step (processes x train.gradient_accumulation_steps)": world_size
        * config.train.gradient_accumulation_steps,
        DATA: key_of(content)[:16],
    }


def known_starts(before: Mapping[str, Any] | None, identity: Mapping[str, object]) -> list[int] | None:
    """The first steps of the epochs that the run so far knows, if it is a run with this plan.

    Where only the samples are others, what was trained stays as it is, and a new epoch begins with the next step.
    """
    if before is None or any(before["settings"].get(key) != value for key, value in identity.items() if key != DATA):
        return None
    starts = [int(start) for start in before["epoch_starts"]]
    if before["settings"].get(DATA) == identity[DATA]:
        return starts
    return [*(start for start in starts if start < before["step"]), int(before["step"])]


def data_changes(
    before: Mapping[str, Any] | None, identity: Mapping[str, object], ledger: Path, samples: Sequence[TrainingSample]
) -> str | None:
    """What is new, gone and changed, if the samples are not those of the run so far; otherwise nothing."""
    if before is None or before["settings"].get(DATA) == identity[DATA]:
        return None
    then = {str(line.get("name")): str(line.get("id")) for line in read_ledger(ledger) if line["kind"] == "sample"}
    now = {sample.example.name: sample.id for sample in samples}
    found = {
        "new": sorted(now.keys() - then.keys()),
        "gone": sorted(then.keys() - now.keys()),
        "changed": sorted(name for name in now.keys() & then.keys() if now[name] != then[name]),
    }
    parts = [f"{len(names)} {what} ({_some(names)})" for what, names in found.items() if names]
    return f"the samples are not those that {ledger.parent} has trained on up to step {before['step']}: " + (
        "; ".join(parts) or "how often they train, or how they are encoded, has changed"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
