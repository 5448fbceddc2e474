"""Fine-tune image-editing diffusion transformers on images of different sizes in the same batch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qflux.version import VERSION

if TYPE_CHECKING:
    from qflux.commands import (
        FluxKontextLoraTrainer,
        QwenImageEditPlusTrainer,
        QwenImageEditTrainer,
        QwenImageTrainer,
        Trainer,
    )
    from qflux.config import Config, load_config

    __version__: str

_TRAINERS = "FluxKontextLoraTrainer", "QwenImageEditPlusTrainer", "QwenImageEditTrainer", "QwenImageTrainer", "Trainer"
_HOMES = dict.fromkeys(_TRAINERS, "qflux.commands") | dict.fromkeys(("Config", "load_config"), "qflux.config")

__all__ = [
    "Config",
    "FluxKontextLoraTrainer",
    "QwenImageEditPlusTrainer",
    "QwenImageEditTrainer",
    "QwenImageTrainer",
    "Trainer",
    "__version__",
    "load_config",
]


def __getattr__(name: str) -> Any:
    """Public names on first use: importing qflux does not import torch and diffusers."""
    if name == "__version__":
        return VERSION
    if name not in _HOMES:
        raise AttributeError(f"module 'qflux' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
