"""How a run fits into its card: chosen before anything is loaded, told, and kept with the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qflux.capacity.card import Card
from qflux.capacity.choice import Choice
from qflux.capacity.footprint import Footprint
from qflux.capacity.planner import Prediction, Step, choose, compiles, without_a_card
from qflux.config import Config
from qflux.data.plan import TrainingPlan
from qflux.files.atomic import write_json
from qflux.memory.placing import limit_memory
from qflux.models.family import Family
from qflux.models.loading import empty_transformer
from qflux.runs.paths import RunPaths
from qflux.training.distributed import World

logger = logging.getLogger(__name__)

LOOKED_AT = 64
"""Steps that a choice is made for: they are drawn at random, so the others are like them."""


_SETTINGS = (
    "method",
    "distributed",
    "noises_per_sample",
    "tokens_per_pass",
    "gradient_checkpointing",
    "streamed_blocks",
    "keep_attention",
    "offload_inputs",
    "compile",
)


def fitted(
    config: Config, family: Family, device: torch.device, steps: Sequence[Step], longest: int = 0, processes: int = 1
) -> tuple[Choice, Prediction | None]:
    """How a run goes about its steps, and what that takes.

    `steps` are some of one process, `longest` are the tokens of the largest sample of all.
    """
    card = Card.of(device, config.memory)
    if card is None or not steps:
        return without_a_card(config), None
    with torch.device("meta"):
        transformer = empty_transformer(family.transformer, config.model)
    arithmetic = family.arithmetic(transformer)
    footprint = Footprint.of(config, family, transformer)
    if config.train.distributed == "fsdp":
        footprint = footprint.sharded(processes)
    return choose(config, footprint, arithmetic, card, steps, compiled=compiles(config, device), longest=longest)


def fitted_to_run(config: Config, family: Family, device: torch.device, plan: TrainingPlan, world: World) -> Choice:
    """The same for a run that begins or goes on: what it has begun with is what it goes on with."""
    limit_memory(device, config.memory)
    path = RunPaths(config.run_dir).fitting
    asked = _asked(config, device, world.size)

    def decide() -> dict[str, Any]:
        known = _recorded(path, asked)
        if known is not None:
            return known.dump()
        tokens = [int(count) for count in plan.tokens]
        steps = [
            [[tokens[visit.sample] for visit in batch] for batch in step.ranks[0]]
            for _, step in plan.steps(0, min(LOOKED_AT, plan.first_step(1)))
        ]
        choice, predicted = fitted(config, family, device, steps, max(tokens), world.size)
        if predicted is not None:
            logger.info("%s", predicted.described(choice))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"asked": asked, "choice": choice.dump()})
        return choice.dump()

    return Choice(**(world.share(world.first(decide)) or {}))


def _recorded(path: Path, asked: dict[str, Any]) -> Choice | None:
    """What was chosen when the same was asked for; nothing, if the file is of something else, or not to be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Choice.read(found["choice"]) if found["asked"] == asked else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _asked(config: Config, device: torch.device, processes: int) -> dict[str, Any]:
    """Everything that a choice is made from, but for the data."""
    train, values = config.train, config.dump()
    return {
        "device": _name(device),
        "processes": processes,
        "family": config.family,
        "memory": config.memory,
        "model": {
            name: values["model"][name] for name in ("pretrained", "transformer", "dtype", "quantization", "precision")
        },
        "lora": values["lora"],
        "optimizer": config.optimizer.class_path,
        "train": {name: getattr(train, name) for name in _SETTINGS},
        "ema": train.ema is not None,
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
