"""Two token streams of a batch, and the order in which each sample is contiguous.

Stream order is `[first_0 first_1 … | second_0 second_1 …]`, joint order `[first_0 second_0 | first_1 second_1 | …]`,
or whatever order a sample's tokens have.
Text and image tokens are interleaved so for attention, target and control tokens to become the images of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from qflux.ragged.transfer import upload


@dataclass(frozen=True)
class Interleave:
    """A permutation between stream order and joint order, and the sample every token belongs to."""

    first_sample: Tensor
    second_sample: Tensor
    joint_sample: Tensor
    _joint_order: Tensor
    _stream_order: Tensor

    @classmethod
    def build(
        cls,
        first_lengths: Sequence[int],
        second_lengths: Sequence[int],
        device: torch.device | str | None = None,
        orders: Sequence[Tensor] | None = None,
    ) -> Interleave:
        """From the number of tokens each sample has in either stream. Computed on the host: nothing waits.

        `orders` may say for each sample in which order its tokens stand in the joint sequence: `(t,)`, numbers of the
        first stream's tokens, and behind them of the second's.
        """
        samples = torch.arange(len(first_lengths))
        first = samples.repeat_interleave(torch.tensor(first_lengths))
        second = samples.repeat_interleave(torch.tensor(second_lengths))
        # A stable sort by sample is the joint order: the first stream comes first within each sample.
        stream_sample = torch.cat([first, second])
        joint_order = torch.argsort(stream_sample, stable=True)
        if orders is not None:
            starts = accumulate((len(order) for order in orders), initial=0)
            joint_order = joint_order[torch.cat([order + start for order, start in zip(orders, starts, strict=False)])]
        parts = (first, second, stream_sample[joint_order], joint_order, torch.argsort(joint_order))
        return cls(*(upload(part, device) for part in parts))

    @property
    def joint_rows(self) -> tuple[Tensor, Tensor]:
        """The place in joint order of every token of the first and of the second stream."""
        first, second = self._stream_order.split([len(self.first_sample), len(self.second_sample)])
        return first, second

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """Both streams as one tensor in joint order."""
        return _Reorder.apply(torch.cat([first, second]), self._joint_order, self._stream_order)

    def split(self, joint: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `join`."""
        streams = _Reorder.apply(joint, self._stream_order, self._joint_order)
        first, second = streams.split([len(self.first_sample), len(self.second_sample)])
        return first, second


class _Reorder(torch.autograd.Function):
    """Rows in another order. `index_select` alone would scatter-add its gradient: slow, and on CUDA not repeatable."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
