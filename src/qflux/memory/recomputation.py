"""Blocks that keep their inputs only, and compute their activations again when the backward pass needs them."""

from __future__ import annotations

from collections.abc import Container
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from qflux.memory.hosting import HostedInputs
from qflux.ragged.kept import Record


@dataclass(frozen=True)
class Recomputation:
    """Which blocks are recomputed, and what is done with what they keep all the same."""

    chosen: Container[int]
    """The `id` of each; that may grow later."""
    keeps_attention: bool = False
    """They keep what attention gave, and it is not computed again."""
    hosted: HostedInputs | None = None
    """Where their inputs wait; none: on the device."""

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        """Run a block."""
        if id(block) not in self.chosen:
            return block(*args)
        context = Record().contexts if self.keeps_attention else noop_context_fn
        with nullcontext() if self.hosted is None else self.hosted.saving(args):
            return checkpoint(block, *args, use_reentrant=False, context_fn=context)


def recompute(transformer: Any, chosen: Container[int], keeps_attention: bool = False, hosted: bool = False) -> None:
    """Let a transformer recompute the blocks whose `id` is among the chosen; see `Recomputation`."""
    run = Recomputation(chosen, keeps_attention, HostedInputs() if hosted else None)
    transformer.enable_gradient_checkpointing(run)
