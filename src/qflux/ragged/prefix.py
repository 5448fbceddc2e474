"""What does not depend on the noise is computed once: keys and values of a prefix, kept while an image is made.

Where text and controls do not see the target, they are the same in every step. In the first one all tokens run, and
each block leaves the keys and values of its prefix here; from then on targets run alone, and see those and themselves.

Shapes: P prefix, M target tokens of the whole batch; H heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qflux.ragged.attention import Segments, ragged_attention
from qflux.ragged.interleave import Interleave
from qflux.ragged.layout import RaggedLayout


@dataclass(eq=False)
class PrefixMemory:
    """The prefixes of one batch, block by block."""

    blocks: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values `(P, H, D)`."""
    layout: Any = None
    """Where the tokens of the batch lie; the same in every step."""


class _StandIn:
    """What a block needs of a layout beside attention."""

    def read(self, joint: Tensor) -> Tensor:
        """All that a block is given."""
        return joint


@dataclass(eq=False)
class Recorded(_StandIn):
    """Stands in for a layout in the first step: attention as it is there, of which the prefix is kept."""

    joint: RaggedLayout
    rows: Tensor
    """`(P,)` where the tokens of prefixes lie."""
    memory: PrefixMemory

    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.memory.blocks.append((key.index_select(0, self.rows), value.index_select(0, self.rows)))
        return self.joint.attend(query, key, value)


class Continued(_StandIn):
    """Stands in for a layout in all further steps: targets see what was kept, and themselves."""

    def __init__(self, memory: PrefixMemory, prefixes: Sequence[int], targets: Sequence[int], device: Any) -> None:
        """From the tokens of each sample."""
        self._kept: Iterator[tuple[Tensor, Tensor]] = iter(memory.blocks)
        self._order = Interleave.build(prefixes, targets, device)
        self._queries = Segments.of(targets, device)
        self._keys = Segments.of(list(map(sum, zip(prefixes, targets, strict=True))), device)

    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`(M, H, D)` each; called by one block after the other."""
        keys, values = next(self._kept)
        keys, values = self._order.join(keys, key), self._order.join(values, value)
        return ragged_attention(query, keys, values, self._queries, self._keys)
