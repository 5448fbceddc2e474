"""Model families. To add one: a folder like `flux_kontext/` and a line in `registry`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qflux.models import registry

if TYPE_CHECKING:
    from qflux.models.family import Family
    from qflux.models.flux_kontext.transformer import FluxTransformer2DModel
    from qflux.models.qwen_image.transformer import QwenImageTransformer2DModel
    from qflux.models.registry import get_family

    FAMILIES: dict[str, Family]

__all__ = ["FAMILIES", "Family", "FluxTransformer2DModel", "QwenImageTransformer2DModel", "get_family"]

_HOMES = {
    "Family": "family",
    "FluxTransformer2DModel": "flux_kontext.transformer",
    "QwenImageTransformer2DModel": "qwen_image.transformer",
    "get_family": "registry",
}


def __getattr__(name: str) -> Any:
    """Public names on first use: facts of models can be asked for without torch."""
    if name == "FAMILIES":
        return {known: registry.get_family(known) for known in registry.names()}
    if name not in _HOMES:
        raise AttributeError(f"module 'qflux.models' has no attribute {name!r}")
    return getattr(import_module(f"qflux.models.{_HOMES[name]}"), name)
