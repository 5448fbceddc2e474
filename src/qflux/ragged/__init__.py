"""Batches of samples that differ in length, as one concatenated token sequence. Knows tensors, knows no model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qflux.ragged.layout import PackedLayout, PaddedLayout, RaggedLayout

__all__ = ["PackedLayout", "PaddedLayout", "RaggedLayout"]


def __getattr__(name: str) -> Any:
    """Public names on first use: `shapes` needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'qflux.ragged' has no attribute {name!r}")
    from qflux.ragged import layout  # noqa: PLC0415

    return getattr(layout, name)
