"""Attention over samples of different length; the one place that chooses a kernel.

Shapes: T joint tokens of the whole batch, H heads, D channels of a head, S tokens of one padded sample.

The choice follows `benchmarks/attention_kernels.py`, measured on one H200 (forward + backward, milliseconds):

    samples               per sample, cuDNN    per sample, flash    varlen
    2560, 3712, 5120, 8704            10.1                 18.5      16.9
    8 x 2560                           5.3                  9.1       7.6
    8 x 1536                           3.6                  4.6       3.0
    32 x 512                           9.5                  9.7       2.0

cuDNN's kernel for Hopper and later is far ahead once a call is long enough to hide its launch; otherwise one
variable-length flash call for all samples wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qflux.ragged.recomputed.kept import fused
from qflux.ragged.transfer import upload

LONG_SAMPLE = 2048
"""Mean tokens per sample from which one cuDNN call per sample beats one variable-length call for all."""

BY_SPEED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# Not frozen: compiled code would look into a frozen dataclass, and be compiled anew for every batch.
@dataclass(eq=False)
class Segments:
    """Where samples lie in a packed sequence, known on the host, so that nothing waits for the device."""

    lengths: tuple[int, ...]
    longest: int
    offsets: Tensor
    """`(B + 1,)` int32, on the device: sample b is rows `offsets[b]` to `offsets[b + 1]`."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Segments:
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), max(lengths, default=0), upload(offsets, device))


def ragged_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Segments, keys: Segments | None = None
) -> Tensor:
    """Each sample attends to itself. `(T, H, D)` each; `keys`, where a sample has more of them than queries."""
    if not len(query):
        return nothing(query, key, value)
    keys = keys or queries
    query, key, value = under_autocast(query, key, value)
    if prefers_varlen(query, queries.lengths):
        return all_at_once(query, key, value, queries, keys)
    parts = zip(query.split(queries.lengths), key.split(keys.lengths), value.split(keys.lengths), strict=True)
    with sdpa_kernel(BY_SPEED, set_priority=True):
        out = torch.cat([_attend_one(q, k, v) for q, k, v in parts])
    return contiguous_gradient(out)


def all_at_once(query: Tensor, key: Tensor, value: Tensor, queries: Segments, keys: Segments, **options: Any) -> Tensor:
    """One call of varying lengths for all samples. CUDA, half precision."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  (registers CUDA ops on import)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = varlen_attn(query, key, value, queries.offsets, keys.offsets, queries.longest, keys.longest, **options)
        return cast(Tensor, found)

    return fused(attend, query, key, value)


def described_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """On the meta device, where nothing is computed: what a fused kernel would keep, and what it would return."""
    return fused(_Described.apply, query, key, value)


class _Described(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of no tokens at all, of which all three have their part in the graph, and so a gradient of zeros."""
    return query + key + value


def contiguous_gradient(attended: Tensor) -> Tensor:
    """The same tensor, whose gradient will be contiguous when it arrives.

    cuDNN's attention backward reads out of bounds when its gradient is a slice of a wider tensor (torch 2.11).
    """
    return _ContiguousGradient.apply(attended)


def needs_contiguous_gradient(tokens: Tensor) -> bool:
    """Whether attention of such tokens may run in that kernel, and will be asked for a gradient."""
    may_run = tokens.is_cuda and tokens.dtype in (torch.bfloat16, torch.float16)
    may_run = may_run and (torch.compiler.is_compiling() or torch.backends.cuda.cudnn_sdp_enabled())
    return may_run and torch.is_grad_enabled()


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended: Tensor) -> Tensor:
        return attended.view_as(attended)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention over a padded batch: `(B * S, H, D)` each.

    `mask` is true where a key is valid, `(B, S)`, or where the query of a row sees the key of a column, `(B, S, S)`.
    """
    batch = mask.shape[0]
    if not len(query):
        return nothing(query, key, value)
    q, k, v = (rearrange(x, "(b s) h d -> b h s d", b=batch) for x in (query, key, value))
    with sdpa_kernel(WITHOUT_CUDNN):  # cuDNN's reads out of bounds on a masked batch of this kind (torch 2.11)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.view(batch, 1, -1, mask.shape[-1]))
    return rearrange(out, "b h s d -> (b s) h d")


def _attend_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = heads_first(query, key, value)
    return tokens_first(fused(F.scaled_dot_product_attention, q, k, v))


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """`(S, H, D)` as `(1, H, S, D)`; by hand, because it is done for every sample of every block."""
    return [x[None].transpose(1, 2) for x in tensors]


def tokens_first(attended: Tensor) -> Tensor:
    """The inverse for one tensor. Not `attended[0]`, whose gradient would be copied into a tensor of zeros."""
    return attended.squeeze(0).transpose(0, 1)


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does before torch's own attention: norms ran in float32, attention runs in the autocast dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)


def prefers_varlen(query: Tensor, lengths: Sequence[int]) -> bool:
    """Whether one variable-length call beats a call for each of these numbers of queries."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not has_flash(query.device.index):
        return False
    long = sum(lengths) >= LONG_SAMPLE * len(lengths)
    return not (long and _has_fast_cudnn(query.device.index) and torch.backends.cuda.cudnn_sdp_enabled())


@cache
def has_flash(device: int) -> bool:
    """Whether flash attention, and with it the kernel of varying lengths, runs on a GPU."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_fast_cudnn(device: int) -> bool:
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)
