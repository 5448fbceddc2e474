"""Fine-tune image-editing diffusion transformers on images of different sizes in the same batch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qflux.models.registry import all_facts
from qflux.version import VERSION

if TYPE_CHECKING:
    from qflux.commands import Trainer
    from qflux.config import Config, load_config

    __version__: str

_HOMES = {"Trainer": "qflux.commands", "Config": "qflux.config", "load_config": "qflux.config"}
_FAMILIES = {facts.trainer: facts.name for facts in all_facts()}
"""Trainers that are bound to a family, by name."""

__all__ = ["Config", "Trainer", "__version__", "load_config", *_FAMILIES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Public names on first use: importing qflux does not import torch and diffusers."""
    if name == "__version__":
        return VERSION
    if name in _FAMILIES:
        globals()[name] = made = import_module("qflux.commands").bound_trainer(name, _FAMILIES[name])
        return made
    if name not in _HOMES:
        raise AttributeError(f"module 'qflux' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
