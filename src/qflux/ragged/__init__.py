"""Batches of samples that differ in length, as one concatenated token sequence. Knows tensors, knows no model."""

from qflux.ragged.layout import PackedLayout, PaddedLayout, RaggedLayout

__all__ = ["PackedLayout", "PaddedLayout", "RaggedLayout"]
