"""Which attention kernel is fastest for a ragged batch: the measurements behind `qflux.ragged.attention`.

    python benchmarks/attention_kernels.py          # needs CUDA

Forward and backward of B samples of 24 heads × 128 channels in bf16. Every row is the median of one run. The second
table is about targets behind one prefix (`qflux.ragged.spans`): a call for each of them, one call of varying lengths
for all, what qflux chooses, and as many samples of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from qflux.ragged import spans
from qflux.ragged.layout import PackedLayout
from qflux.ragged.spans import Span, SpanAttention

HEADS, HEAD_DIM = 24, 128
BATCHES: dict[str, list[int]] = {
    "4 mixed, 2560..8704": [2560, 3712, 5120, 8704],
    "4 mixed, 2560..4256": [2560, 3712, 3584, 4256],
    "2 x 4608": [4608] * 2,
    "8 x 2560": [2560] * 8,
    "8 x 1536": [1536] * 8,
    "16 x 1024": [1024] * 16,
    "16 x 768": [768] * 16,
    "32 x 512": [512] * 32,
    "64 x 256": [256] * 64,
    "128 x 128": [128] * 128,
}


PREFIXES = ((4096, 4, 4096), (2048, 4, 2048), (1024, 4, 1024), (1024, 2, 1024), (512, 8, 512), (256, 4, 256))
"""Tokens of a prefix, targets behind it, and tokens of each."""


def per_sample(lengths: Sequence[int], *backends: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        with sdpa_kernel(list(backends)):
            for q, k, v in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True):
                heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
                outputs.append(F.scaled_dot_product_attention(*heads_first)[0].transpose(0, 1))
        return torch.cat(outputs)

    return attend


def variable_length(lengths: Sequence[int]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to("cuda", torch.int32)
    longest = max(lengths)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cast(Tensor, varlen_attn(query, key, value, offsets, offsets, longest, longest))

    return attend


def behind_prefix(prefix: int, count: int, target: int) -> list[Span]:
    spans = [Span((0, prefix), ((0, prefix),))]
    for start in range(prefix, prefix + count * target, target):
        spans.append(Span((start, start + target), ((0, prefix), (start, start + target))))
    return spans


def attend_by(attention: SpanAttention, varlen: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """With one kernel or the other, whatever qflux would choose."""
    with patch.object(spans, "prefers_varlen", lambda query, lengths: varlen):
        return attention(query, key, value)


def milliseconds(attend: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int) -> float:
    inputs = [
        torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    upstream = torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    times = []
    for repeat in range(13):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.autograd.grad(attend(*inputs), inputs, upstream)
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds, forward + backward\n")
    print("| samples x tokens | per sample, cuDNN | per sample, flash | varlen | qflux | arithmetic at 800 TFLOP/s |")
    print("|---|---|---|---|---|---|")
    for name, lengths in BATCHES.items():
        kernels = (
            per_sample(lengths, SDPBackend.CUDNN_ATTENTION),
            per_sample(lengths, SDPBackend.FLASH_ATTENTION),
            variable_length(lengths),
        )
        bound = sum(14 * HEADS * HEAD_DIM * n * n for n in lengths) / 800e12 * 1e3
        layout = PackedLayout.build(lengths, [0] * len(lengths), "cuda")
        cells = [f"{milliseconds(kernel, sum(lengths)):.2f}" for kernel in (*kernels, layout.attend)]
        print(f"| {name} | {' | '.join(cells)} | {bound:.2f} |", flush=True)
    print("\n| prefix, targets | per span, cuDNN | varlen | qflux | own samples, cuDNN |")
    print("|---|---|---|---|---|")
    for prefix, count, target in PREFIXES:
        chosen = SpanAttention.of([behind_prefix(prefix, count, target)], "cuda")
        tokens, apart = prefix + count * target, [prefix + target] * count
        forced = [partial(attend_by, chosen, varlen) for varlen in (False, True)]
        ways: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [*forced, chosen]
        cells = [f"{milliseconds(way, tokens):.2f}" for way in ways]
        cells.append(f"{milliseconds(per_sample(apart, SDPBackend.CUDNN_ATTENTION), sum(apart)):.2f}")
        print(f"| {prefix}, {count} x {target} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
