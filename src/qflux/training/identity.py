"""What a continued run must share with the one it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qflux.config import Config
from qflux.data.store import key_of
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
_LENGTH_MATTERS = ("linear", "cosine", "cosine_with_restarts", "polynomial")


def path_settings(config: Config, total: int) -> dict[str, object]:
    """What decides where training goes, besides the data."""
    values = config.dump()
    sections = {name: values[name] for name in ("family", "optimizer", "loss")}
    if config.train.method == "lora":
        sections["lora"] = values["lora"]
    for key in ("pretrained", "transformer", "dtype", "quantization", "max_sequence_length"):
        sections[f"model.{key}"] = values["model"][key]
    sections["data.processor"] = values["data"]["processor"]
    for key in _PATH_KEYS:
        sections[f"train.{key}"] = values["train"][key]
    if config.train.lr_scheduler in _LENGTH_MATTERS:
        sections["train.max_train_steps"] = total
    return sections


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
        "data (samples)": key_of(content)[:16],
    }


def known_starts(before: Mapping[str, Any] | None, identity: Mapping[str, object]) -> list[int] | None:
    """The first steps of the epochs that the run so far knows, if it is a run with this data."""
    if before is None or any(before["settings"].get(key) != value for key, value in identity.items()):
        return None
    return [int(start) for start in before["epoch_starts"]]
