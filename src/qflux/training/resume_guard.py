"""What a resumed run must share with the one it continues, and what becomes of what it does not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qflux.config import Config, TrainSettings
from qflux.data.sample import Sample
from qflux.errors import CheckpointError
from qflux.files.hashing import key_of
from qflux.losses.timesteps import NoiseLevels, NoiseShift
from qflux.runs.ledger import trained_ids
from qflux.training.optimizer.schedule import build_schedule

logger = logging.getLogger(__name__)

NOISE_SHIFT = "noise schedule"
"""The shift that a run draws its noise levels with; runs of before 0.1.0 have none recorded."""
DATA = "data (samples)"
STEPS = "train.max_train_steps"
_LENGTH_MATTERS = ("linear", "cosine", "cosine_with_restarts", "polynomial")
"""Schedules that end where the run does."""


@dataclass(frozen=True)
class Past:
    """The run so far, as its newest complete checkpoint tells it."""

    settings: Mapping[str, Any]
    epoch_starts: list[int]
    step: int
    """Steps done."""


def path_settings(config: Config, total: int) -> dict[str, object]:
    """What decides where training goes, besides the data: the fields that say so."""
    marked = config.marked("resume")
    sections: dict[str, object] = {name: marked[name] for name in ("family", "optimizer", "loss")}
    if config.train.method == "lora":
        sections["lora"] = marked["lora"]
    sections["data.processor"] = marked["data"]["processor"]
    for section in ("model", "train"):
        sections |= {f"{section}.{key}": value for key, value in marked[section].items()}
    if config.train.lr_scheduler in _LENGTH_MATTERS:
        sections[STEPS] = total
    return sections


def data_identity(config: Config, samples: Sequence[Sample], world_size: int) -> dict[str, object]:
    """What decides the plan: the samples, how often each trains, and how many make a step.

    Four micro-batches in one process and two in each of two are the same step.
    """
    content = sorted((_key(sample), sample.rate, sample.is_prior) for sample in samples)
    return {
        "seed": config.seed,
        "data.batch_size": config.data.batch_size,
        "data.max_tokens": config.data.max_tokens,
        "micro-batches in a step (processes x train.gradient_accumulation_steps)": world_size
        * config.train.gradient_accumulation_steps,
        DATA: key_of(content)[:16],
    }


def _key(sample: Sample) -> str:
    assert sample.embeddings is not None
    return sample.embeddings.identity


def known_starts(past: Past | None, identity: Mapping[str, object]) -> list[int] | None:
    """The first steps of the epochs that the run so far knows, if it is a run with this plan.

    Where only the samples are others, what was trained stays as it is, and a new epoch begins with the next step.
    """
    if past is None or any(past.settings.get(key) != value for key, value in identity.items() if key != DATA):
        return None
    if past.settings.get(DATA) == identity[DATA]:
        return list(past.epoch_starts)
    return [*(start for start in past.epoch_starts if start < past.step), past.step]


def require_same_data(
    past: Past | None, identity: Mapping[str, object], ledger: Path, samples: Sequence[Sample], accept: bool
) -> None:
    """An error if the samples are not those of the run so far, unless that is accepted; it says what has changed."""
    if past is None or past.settings.get(DATA) == identity[DATA]:
        return
    then, now = trained_ids(ledger), {sample.name: sample.id for sample in samples}
    found = {
        "new": sorted(now.keys() - then.keys()),
        "gone": sorted(then.keys() - now.keys()),
        "changed": sorted(name for name in now.keys() & then.keys() if now[name] != then[name]),
    }
    parts = [f"{len(names)} {what} ({_some(names)})" for what, names in found.items() if names]
    problem = f"the samples are not those that {ledger.parent} has trained on up to step {past.step}: " + (
        "; ".join(parts) or "how often they train, or how they are encoded, has changed"
    )
    if not accept:
        remedy = "--accept-data-change goes on with them (a new epoch begins); another run_name begins anew."
        raise CheckpointError(problem, remedy)
    logger.warning("%s; a new epoch begins with them", problem)


def warn_of_length(past: Past | None, settings: TrainSettings, total: int) -> None:
    """Say what becomes of a learning rate whose schedule was made for another number of steps."""
    steps = past.settings.get(STEPS) if past is not None else None
    if past is None or not isinstance(steps, int) or steps == total:
        return
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    was, now = (build_schedule(settings, optimizer, length).factor(past.step) for length in (steps, total))
    logger.warning(
        "the run was planned for %d steps and is now for %d: lr_scheduler %s stretches over all of them; "
        "at step %d the learning rate goes from %.3g to %.3g of its full value",
        steps,
        total,
        settings.lr_scheduler,
        past.step,
        was,
        now,
    )


def noise_levels(
    config: Config, own: NoiseShift, steps: int, past: Past | None
) -> tuple[NoiseLevels, dict[str, object]]:
    """Noise levels on the model's `own` schedule of so many steps, and what a checkpoint records of it.

    A run that began on another schedule, as `past` tells, stays on that one.
    """
    began = own
    if past is not None:
        # Until 0.1.0 every family trained on one schedule, `NoiseShift`'s defaults, and nothing was recorded.
        recorded = past.settings.get(NOISE_SHIFT)
        try:
            began = own if recorded == asdict(own) else NoiseShift(**recorded) if recorded else NoiseShift()
        except TypeError as error:
            raise CheckpointError(
                f"{config.run_dir} has a noise schedule that this version does not know: {error}",
                "update qflux, or choose another run_name.",
            ) from None
    if began != own:
        logger.warning(
            "this run began on a noise schedule with a shift of %s and goes on with it; that of %s is %s: "
            "a run of another name takes it",
            began,
            config.model.pretrained,
            own,
        )
    is_old = past is not None and NOISE_SHIFT not in past.settings
    return NoiseLevels(config.loss.timesteps, began, steps), {} if is_old else {NOISE_SHIFT: asdict(began)}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
