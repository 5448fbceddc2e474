"""Model families. To add one: a folder like `flux_kontext/` and a line in `registry`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qflux.models import registry

if TYPE_CHECKING:
    from qflux.models.family import Family
    from qflux.models.registry import get_family

    FAMILIES: dict[str, Family]

_TRANSFORMERS = {facts.transformer: facts.name for facts in registry.all_facts()}
__all__ = ["FAMILIES", "Family", "get_family", *_TRANSFORMERS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Public names on first use: facts of models can be asked for without torch."""
    if name == "FAMILIES":
        return {known: registry.get_family(known) for known in registry.names()}
    if name == "get_family":
        return registry.get_family
    if name == "Family":
        return import_module("qflux.models.family").Family
    if name in _TRANSFORMERS:
        return registry.get_family(_TRANSFORMERS[name]).transformer
    raise AttributeError(f"module 'qflux.models' has no attribute {name!r}")
