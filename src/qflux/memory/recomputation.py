"""Blocks that keep their inputs only, and compute their activations again when the backward pass needs them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qflux.memory.hosting import HostMemory
from qflux.ragged.eightbit.linear import EightBitLinear
from qflux.ragged.recomputed.kept import Record
from qflux.ragged.recomputed.unread import LastLinear, Unread, leaving_out


@dataclass(frozen=True)
class Recomputation:
    """Which blocks are recomputed, and what is done with what they keep all the same."""

    chosen: Container[int]
    """The `id` of each; that may grow later."""
    keeps_attention: bool = False
    """They keep what attention gave, and it is not computed again."""
    hosted: HostMemory | None = None
    """Where their inputs wait, and what attention gave if it is kept; none: on the device."""
    unread: Collection[int] = ()
    """The `id` of each whose last product is not computed again."""

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        """Run a block."""
        if id(block) not in self.chosen:
            return block(*args)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            record = Record(None if self.hosted is None else self.hosted.send)
            forward, again = record.contexts() if self.keeps_attention else (nullcontext(), nullcontext())
            return forward, _both(again, leaving_out()) if id(block) in self.unread else again

        with nullcontext() if self.hosted is None else self.hosted.saving(args):
            return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


@contextmanager
def _both(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def recompute(transformer: Any, chosen: Container[int], keeps_attention: bool = False, hosted: bool = False) -> None:
    """Let a transformer recompute the blocks whose `id` is among the chosen; see `Recomputation`."""
    run = Recomputation(chosen, keeps_attention, HostMemory() if hosted else None, _prepare(transformer))
    transformer.enable_gradient_checkpointing(run)


def _prepare(transformer: nn.Module) -> set[int]:
    """Make the last layers of blocks ready to be left out; the `id` of each block for which that may be done.

    It may not where a gate trains, where the result is multiplied by something that trains (DoRA), or where it is
    clipped (half precision); the weights must be frozen, and kept as they are.
    """
    blocks = [module for module in transformer.modules() if isinstance(getattr(module, "unread", None), Unread)]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    if any(parameter.requires_grad and id(parameter) not in inside for parameter in transformer.parameters()):
        return set()  # gates depend on what is outside
    return {id(block) for block in blocks if _prepared(block)}


def _prepared(block: Any) -> bool:
    gates = (parameter for name in block.unread.gates for parameter in block.get_submodule(name).parameters())
    layers = [_frozen(block.get_submodule(name)) for name in block.unread.layers]
    if any(parameter.requires_grad for parameter in gates) or None in layers:
        return False
    for layer in layers:
        if isinstance(layer, EightBitLinear):
            layer.is_last = True
        else:
            assert layer is not None
            layer.__class__ = LastLinear
    return True


def _frozen(layer: nn.Module) -> nn.Linear | None:
    """The layer itself, or the one below its LoRA, if it can be left out."""
    base = layer.base_layer if hasattr(layer, "lora_A") and not layer.lora_variant else layer
    if type(base) not in (nn.Linear, LastLinear, EightBitLinear) or not isinstance(base, nn.Linear):
        return None
    weight = base.weight
    is_plain = type(weight) is nn.Parameter and not weight.requires_grad and weight.dtype != torch.float16
    return base if is_plain else None
