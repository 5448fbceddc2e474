"""Attention in which a token sees parts of its sample: groups of tokens, what came before it, a prefix and itself.

A sample's attention is a list of spans. The queries of its spans are its tokens, each once and in their order; the keys
of a span are ranges of the same sample, one after another. Full attention is one span over everything, and has a way of
its own (`attention`).

Shapes: T tokens of the whole batch, H heads, D channels of a head; t tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from qflux.ragged.attention import (
    BY_SPEED,
    Segments,
    all_at_once,
    contiguous_gradient,
    has_flash,
    heads_first,
    prefers_varlen,
    tokens_first,
    under_autocast,
)
from qflux.ragged.recomputed.kept import fused

FEW = 4
"""So many short spans run faster one by one: what one call for all of them saves, putting them together costs."""

Range = tuple[int, int]
"""First token, and the one after the last."""


@dataclass(frozen=True)
class Span:
    """Tokens of a sample that see the same others."""

    queries: Range
    keys: tuple[Range, ...]
    causal: bool = False
    """The last query sees all keys, the one before it all but the last, and so on."""

    @property
    def width(self) -> int:
        """How many queries there are."""
        return self.queries[1] - self.queries[0]

    @property
    def reach(self) -> int:
        """How many keys there are."""
        return sum(end - first for first, end in self.keys)

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key that it sees."""
        return self.width * self.reach - (self.width * (self.width - 1) // 2 if self.causal else 0)

    def moved(self, by: int) -> Span:
        """The same in a sequence in which the sample begins so much later."""
        queries, *keys = ((first + by, end + by) for first, end in (self.queries, *self.keys))
        return Span(queries, tuple(keys), self.causal)


@dataclass(eq=False)
class Arrangement:
    """The joint sequence of one sample whose images do not simply follow its text."""

    order: Tensor
    """`(t,)` which token stands where: numbers of its text tokens, and behind them of its image tokens."""
    spans: tuple[Span, ...]
    """What sees what, in that order."""


def require_spans(spans: Sequence[Span], length: int) -> None:
    """An error unless the queries are all tokens of a sample, and the keys lie in it."""
    ends = [0, *(span.queries[1] for span in spans)]
    if [span.queries[0] for span in spans] != ends[:-1] or ends[-1] != length:
        raise ValueError(f"the queries of spans are not the {length} tokens of their sample in order: {spans}")
    for span in spans:
        if any(not 0 <= first < end <= length for first, end in span.keys):
            raise ValueError(f"keys outside of a sample of {length} tokens: {span}")
        if span.causal and span.reach < span.width:
            raise ValueError(f"a causal span needs a key for every query: {span}")


def mask_of(spans: Sequence[Span]) -> Tensor:
    """`(t, t)` true where the token of a row sees that of a column."""
    total = spans[-1].queries[1]
    seen = torch.zeros(total, total, dtype=torch.bool)
    for span in spans:
        columns = torch.cat([torch.arange(*keys) for keys in span.keys])
        rows = torch.ones(span.width, span.reach, dtype=torch.bool)
        seen[slice(*span.queries), columns] = rows.tril(span.reach - span.width) if span.causal else rows
    return seen


@dataclass(eq=False)
class SpanAttention:
    """Attention over the spans of a packed batch.

    Neither this nor `_Group` is frozen: compiled code would look into a frozen dataclass, and be compiled anew for
    every batch.
    """

    spans: tuple[Span, ...]
    """Of all samples, in the tokens of the whole batch."""
    _groups: tuple[_Group, ...]

    @classmethod
    def of(
        cls,
        samples: Sequence[Sequence[Span]],
        device: torch.device | str | None = None,
        wanted: Sequence[Sequence[bool]] | None = None,
    ) -> SpanAttention:
        """From the spans of each sample; queries may be those of its `wanted` tokens alone, which are whole spans."""
        moved, start = list[Span](), 0
        for number, spans in enumerate(samples):
            length = spans[-1].queries[1]
            require_spans(spans, length)
            moved += [span.moved(start) for span in spans if wanted is None or wanted[number][span.queries[0]]]
            start += length
        kinds = ([place for place, span in enumerate(moved) if span.causal == causal] for causal in (True, False))
        return cls(tuple(moved), tuple(_Group.of(places, moved, device) for places in kinds if places))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`(T, H, D)` each, queries perhaps fewer."""
        query, key, value = under_autocast(query, key, value)
        ranges = tuple(span.keys for span in self.spans)
        queries = query.split([span.width for span in self.spans])
        keys, values = _Take.apply(key, ranges), _Take.apply(value, ranges)
        attended: list[Tensor] = [query] * len(self.spans)
        with sdpa_kernel(BY_SPEED, set_priority=True):
            for group in self._groups:
                picked = ([parts[place] for place in group.places] for parts in (queries, keys, values))
                for place, part in zip(group.places, group(*picked), strict=True):
                    attended[place] = part
        return contiguous_gradient(torch.cat(attended))


@dataclass(eq=False)
class _Group:
    """Spans that one kernel can run together: all causal, or none."""

    places: tuple[int, ...]
    """Which spans."""
    causal: bool
    queries: Segments
    keys: Segments
    """Those of all spans, when they are put together."""

    @classmethod
    def of(cls, places: Sequence[int], spans: Sequence[Span], device: torch.device | str | None) -> _Group:
        chosen = [spans[place] for place in places]
        queries, keys = [span.width for span in chosen], [span.reach for span in chosen]
        return cls(tuple(places), chosen[0].causal, Segments.of(queries, device), Segments.of(keys, device))

    def __call__(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> Sequence[Tensor]:
        if len(queries) > FEW and prefers_varlen(queries[0], self.queries.lengths):
            query, key, value = (torch.cat(parts) for parts in (queries, keys, values))
            options = _lower_right() if self.causal else {}
            return all_at_once(query, key, value, self.queries, self.keys, **options).split(self.queries.lengths)
        return [_attend(q, k, v, self.causal) for q, k, v in zip(queries, keys, values, strict=True)]


@cache
def _lower_right() -> dict[str, Any]:
    """How `varlen_attn` is told to be causal: torch has called that differently over time."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  (registers CUDA ops on import)

    return {"window_size": (-1, 0)} if "window_size" in signature(varlen_attn).parameters else {"is_causal": True}


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    kernel = _causal if causal else F.scaled_dot_product_attention
    return tokens_first(fused(kernel, *heads_first(query, key, value)))


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and has_flash(query.device.index):
        # What torch calls for `causal_lower_right`, without what it looks at before.
        return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=True)[0])
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


class _Take(torch.autograd.Function):
    """The keys of every span. Spans share keys: their gradients are added up in one tensor, span after span."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ranges: tuple[tuple[Range, ...], ...]) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.like = ranges, (tokens.shape, tokens.dtype, tokens.device)
        return tuple(
            tokens[keys[0][0] : keys[0][1]] if len(keys) == 1 else torch.cat([tokens[a:b] for a, b in keys])
            for keys in ranges
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shape, dtype, device = ctx.like
        total = torch.zeros(shape, dtype=dtype, device=device)
        for keys, grad in zip(ctx.ranges, grads, strict=True):
            start = 0
            for first, end in keys:
                total[first:end] += grad[start : start + end - first]
                start += end - first
        return total, None
