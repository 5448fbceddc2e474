"""Frozen models on a device that may not have room for them: what does not fit waits in host memory, block by block.

What they compute does not depend on where their weights wait.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qflux.errors import ConfigError
from qflux.memory.streaming import SLOTS, StreamedBlocks, leaves, spread

logger = logging.getLogger(__name__)

GIB = 2**30
_FEWEST = 4
"""Blocks that a list must have to be worth streaming."""


def free_memory(device: torch.device, limit: int | None) -> int | None:
    """Bytes that this process may still take of a device; `limit` is what it may take in all. None: nobody counts."""
    if device.type != "cuda":
        return limit
    held = torch.cuda.memory_allocated(device)  # encoders, for example, that stay
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
    return free if limit is None else max(0, min(free, limit - held))


def limit_memory(device: torch.device, limit: int | None) -> None:
    """Let this process take no more than was asked for, so that what does not fit is found here and not elsewhere.

    Called before anything is loaded, and without a limit too: passes differ in size, and memory that is freed in pieces
    of one size has to serve for others.
    """
    if device.type != "cuda":
        return
    _let_segments_grow()
    if limit is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device.index or torch.cuda.current_device())


def _let_segments_grow() -> None:
    """torch's own allocator, so that what it has freed can be used whole; unless somebody has set it up otherwise.

    On one H200, a step of FLUX.2 klein that has 7.3 GiB of tensors at its peak does not fit into 8 GiB without this.
    """
    is_set = any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if sys.platform == "linux" and not is_set and change is not None:
        change("expandable_segments:True")


def model_bytes(module: nn.Module) -> int:
    """What the weights of a model take, in however many bits they are kept."""
    tensors = [leaf for tensor in (*module.parameters(), *module.buffers()) for leaf in leaves(tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Divided:
    """A model, and those of its blocks that could wait in host memory."""

    model: nn.Module
    chains: tuple[tuple[nn.Module, ...], ...]
    """Blocks that run one after another."""
    sizes: tuple[tuple[int, ...], ...]
    """Bytes of each of them."""
    other: int
    """Bytes outside of them."""

    @classmethod
    def of(cls, model: nn.Module) -> Divided:
        chains = tuple(_chains(model))
        sizes = tuple(tuple(map(model_bytes, blocks)) for blocks in chains)
        return cls(model, chains, sizes, model_bytes(model) - sum(map(sum, sizes)))

    def bytes(self, streamed: Sequence[int]) -> int:
        """On the device, if so many blocks of each chain take turns there."""
        total = self.other
        for sizes, count in zip(self.sizes, streamed, strict=True):
            waiting = {*spread(count, len(sizes))} if count else set[int]()
            total += sum(size for place, size in enumerate(sizes) if place not in waiting)
            total += min(SLOTS, count) * max(sizes)
        return total

    @property
    def none(self) -> list[int]:
        """Every block stays on the device."""
        return [0] * len(self.chains)

    @property
    def all(self) -> list[int]:
        """Every block waits in host memory."""
        return [len(blocks) for blocks in self.chains]

    def fewest(self, room: int) -> list[int]:
        """How many blocks of each chain have to wait so that the rest fits, those of large chains first."""
        streamed = self.none
        for chain in sorted(range(len(self.chains)), key=lambda chain: -sum(self.sizes[chain])):
            for count in range(len(self.chains[chain]) + 1):
                streamed[chain] = count
                if self.bytes(streamed) <= room:
                    return streamed
        return streamed

    def put(self, device: torch.device, streamed: Sequence[int]) -> None:
        """On the device, with so many blocks of each chain that take turns there."""
        for blocks, count in zip(self.chains, streamed, strict=True):
            if count:
                StreamedBlocks([blocks[place] for place in spread(count, len(blocks))], device)
        self.model.to(device)


def place(models: Sequence[nn.Module], device: torch.device, room: int | None, workspace: int = 0) -> None:
    """Put frozen models on a device, of which they may take `room` bytes together; earlier ones have first choice.

    A model that does not fit leaves whole blocks in host memory, as few as it can. `workspace` bytes of the room are
    left free, if the models can do without them.
    """
    divided = [Divided.of(model) for model in models]
    least = [each.bytes(each.all) for each in divided]
    room = None if room is None else min(room, max(room - workspace, sum(least)))
    if room is not None and sum(least) > max(0, room):
        names = ", ".join(type(model).__name__ for model in models)
        raise ConfigError(
            f"{room / GIB:.1f} GiB of the GPU are left for {names}, and even with their blocks in host memory they "
            f"take {sum(least) / GIB:.1f} GiB",
            "raise `memory`, or close what else uses the GPU.",
        )
    for number, each in enumerate(divided):
        streamed = each.none if room is None else each.fewest(room - sum(least[number + 1 :]))
        if any(streamed):
            total = sum(each.all)
            logger.info("%s: %d of %d blocks wait in host memory", type(each.model).__name__, sum(streamed), total)
        each.put(device, streamed)
        room = None if room is None else room - each.bytes(streamed)


def _chains(module: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    """The outermost lists of blocks that are alike."""
    for child in module.children():
        is_chain = isinstance(child, nn.ModuleList) and len(child) >= _FEWEST
        if is_chain and len({type(block) for block in child.children()}) == 1:
            yield tuple(child.children())
        else:
            yield from _chains(child)
