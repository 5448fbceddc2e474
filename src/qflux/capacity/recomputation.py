"""Blocks that keep their inputs only, and compute their activations again when the backward pass needs them."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(transformer: Any, chosen: Container[int]) -> None:
    """Let a transformer recompute the blocks whose `id` is among the chosen; that may grow later."""
    transformer.enable_gradient_checkpointing(partial(_run, chosen))


def _run(chosen: Container[int], block: nn.Module, *args: Any) -> Any:
    if id(block) in chosen:
        return checkpoint(block, *args, use_reentrant=False)
    return block(*args)
