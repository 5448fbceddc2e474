"""Attention over spans equals attention under the mask that they stand for, for outputs and gradients."""

from __future__ import annotations

import random

import pytest
import torch

from qflux.ragged.spans import Span, SpanAttention, mask_of

HEADS, CHANNELS = 3, 8


def full(length: int) -> list[Span]:
    return [Span((0, length), ((0, length),))]


def groups(*lengths: int) -> list[Span]:
    """Each group sees itself."""
    spans, start = [], 0
    for length in lengths:
        spans.append(Span((start, start + length), ((start, start + length),)))
        start += length
    return spans


def block_causal(*parts: int) -> list[Span]:
    """Positive: text, causal; negative: an image, which sees what came before it and itself."""
    spans, start = [], 0
    for part in parts:
        end = start + abs(part)
        spans.append(Span((start, end), ((0, end),), causal=part > 0))
        start = end
    return spans


def one_prefix(prefix: int, *targets: int) -> list[Span]:
    """Targets over one prefix: each sees the prefix and itself, none another target."""
    spans, start = [Span((0, prefix), ((0, prefix),))], prefix
    for target in targets:
        spans.append(Span((start, start + target), ((0, prefix), (start, start + target))))
        start += target
    return spans


def random_sample(rng: random.Random) -> list[Span]:
    some = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    kind = rng.randrange(4)
    if kind == 0:
        return full(sum(some))
    if kind == 1:
        return groups(*some)
    if kind == 2:
        return block_causal(*(rng.choice([1, -1]) * n for n in some))
    return one_prefix(some[0], *some[1:])


@pytest.mark.parametrize("seed", range(12))
def test_outputs_and_gradients_are_those_of_the_mask(seed):
    rng = random.Random(seed)
    attention = SpanAttention.of([random_sample(rng) for _ in range(rng.randint(1, 4))])
    total = attention.spans[-1].queries[1]
    torch.manual_seed(seed)
    inputs = [torch.randn(total, HEADS, CHANNELS, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(total, HEADS, CHANNELS)
    output = attention(*inputs)
    gradients = torch.autograd.grad(output, inputs, upstream)

    query, key, value = (x.transpose(0, 1).double() for x in inputs)
    scores = (query @ key.transpose(1, 2) / CHANNELS**0.5).masked_fill(~mask_of(attention.spans), float("-inf"))
    expected = (scores.softmax(-1) @ value).transpose(0, 1)
    wanted = torch.autograd.grad(expected, inputs, upstream.double())
    assert (output - expected).abs().max() <= 1e-5
    for gradient, reference in zip(gradients, wanted, strict=True):
        assert (gradient - reference).abs().max() <= 1e-5


def test_samples_do_not_see_each_other():
    attention = SpanAttention.of([block_causal(3, -4, 2), full(5), one_prefix(2, 3, 3)])
    mask = mask_of(attention.spans)
    assert not mask[:9, 9:].any()
    assert not mask[9:14, :9].any()
    assert mask[9:14, 9:14].all()
    assert not mask[16:19, 19:].any()


def test_the_mask_is_block_causal_where_spans_are():
    mask = mask_of(block_causal(2, -2, 1)).int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    "spans",
    [
        [Span((0, 2), ((0, 2),)), Span((3, 4), ((0, 4),))],
        [Span((0, 2), ((0, 5),))],
        [Span((0, 3), ((0, 2),), causal=True)],
        [Span((0, 2), ((1, 1),))],
    ],
    ids=["gap", "outside", "causal", "empty"],
)
def test_spans_that_are_no_attention_are_refused(spans):
    with pytest.raises(ValueError, match=r"span|keys"):
        SpanAttention.of([spans])
