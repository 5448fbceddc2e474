"""What a model should be trained with: facts of the published checkpoints, of a folder, and what a machine allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qflux.errors import ConfigError
from qflux.models import registry
from qflux.models.facts import Facts
from qflux.start.machine import Machine


@dataclass(frozen=True)
class Model:
    """What will be trained."""

    facts: Facts
    pretrained: str
    gigabytes: float
    why: str = ""
    """Why it was taken, if nobody asked for it."""

    @property
    def family(self) -> str:
        return self.facts.name

    @property
    def is_small(self) -> bool:
        return self.pretrained == registry.shipped().name


def choose_model(pretrained: str | None, family: str | None, machine: Machine, has_controls: bool) -> Model:
    """The model that somebody names; otherwise the family's own, or the small one where that could not run."""
    if family is not None and family not in registry.names():
        raise ConfigError(f"--family {family} is not known", f"use one of {', '.join(registry.names())}.")
    small = registry.shipped()
    if pretrained in (small.name, "small"):
        if family not in (None, small.family):
            raise ConfigError(
                f"{small.name} is of the family {small.family}, and --family is {family}", "leave it out."
            )
        return Model(registry.facts_of(small.family), small.name, _SMALL_GIGABYTES)
    if pretrained is not None:
        found = _family_of(pretrained)
        if family and found and family != found:
            raise ConfigError(
                f"--model {pretrained} is of the family {found}, and --family is {family}", "leave it out."
            )
        facts = registry.facts_of(family or found or registry.DEFAULT).of(registry.described(pretrained))
        own = _gigabytes(registry.local_folder(pretrained))
        return Model(facts, pretrained, own or facts.gigabytes)
    name = family or (registry.DEFAULT if has_controls else registry.WITHOUT_CONTROLS)
    facts = registry.facts_of(name)
    if family is not None or machine.gpu or _is_here(facts.hub_id):
        return Model(facts, facts.hub_id, facts.gigabytes)
    why = (
        f"there is no GPU here, and no checkpoint of {facts.hub_id}: the small model that ships with qflux is trained, "
        f"which shows within minutes what your data can teach; for the real one, --model {facts.hub_id} on a GPU"
    )
    return Model(registry.facts_of(small.family), small.name, _SMALL_GIGABYTES, why)


def _family_of(pretrained: str) -> str | None:
    """From the description in a folder, or from the name of a checkpoint."""
    return next(iter(registry.families_of(registry.described(pretrained))), None) or _by_name(pretrained)


def _by_name(pretrained: str) -> str | None:
    """The innermost folder says most, and of two families that it names the one it names in more words."""
    for part in reversed(pretrained.split("/")):
        nearest = max(registry.all_facts(), key=lambda facts: facts.spelled_in(part))
        if nearest.spelled_in(part):
            return nearest.name
    return None


def _gigabytes(folder: Path) -> float | None:
    files = list((folder / "transformer").glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / 1e9 if files else None


def _is_here(hub_id: str) -> bool:
    """Whether the hub's cache on this machine holds the checkpoint's transformer."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415

    snapshots = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    return any(snapshots.glob("*/transformer/*.safetensors"))


@dataclass(frozen=True)
class Preset:
    """Settings that depend on the model and the machine."""

    dtype: str
    batch_size: int
    largest_side: int
    """Of the square whose area no image should exceed."""
    gradient_checkpointing: bool
    compile: bool
    steps: int
    notes: tuple[str, ...] = ()


def preset(model: Model, machine: Machine, samples: int) -> Preset:
    """What suits a model on a machine."""
    if model.is_small:
        return Preset("bfloat16" if machine.gpu else "float32", min(4, samples), 192, False, False, 320)
    if not machine.gpu:
        is_large = model.gigabytes > 1
        problem = f"there is no GPU here: a model of {model.gigabytes:.0f} GB takes minutes for a step on a CPU"
        notes = (f"{problem}; this config is written for it all the same",) if is_large else ()
        batch = 1 if is_large else min(4, samples)
        return Preset("float32", batch, LARGEST, is_large, False, _steps(samples, batch), notes)
    # How it fits is the run's own business: it is planned for the card that it starts on.
    batch = min(4, samples)
    return Preset("bfloat16", batch, LARGEST, True, True, _steps(samples, batch))


LARGEST = 1024
_SMALL_GIGABYTES = 0.02


def _steps(samples: int, batch: int) -> int:
    """About a hundred visits of each sample."""
    return min(4000, max(500, 100 * -(-samples // batch)))
