"""Which attention kernel is fastest for a ragged batch: the measurements behind `qflux.ragged.attention`.

    python benchmarks/attention_kernels.py          # needs CUDA

Forward and backward of B samples of 24 heads × 128 channels in bf16. Every row is the median of one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

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
    print("| samples x tokens | per sample, cuDNN | per sample, flash | varlen | arithmetic at 800 TFLOP/s |")
    print("|---|---|---|---|---|")
    for name, lengths in BATCHES.items():
        kernels = (
            per_sample(lengths, SDPBackend.CUDNN_ATTENTION),
            per_sample(lengths, SDPBackend.FLASH_ATTENTION),
            variable_length(lengths),
        )
        bound = sum(14 * HEADS * HEAD_DIM * n * n for n in lengths) / 800e12 * 1e3
        cells = [f"{milliseconds(kernel, sum(lengths)):.2f}" for kernel in kernels]
        print(f"| {name} | {' | '.join(cells)} | {bound:.2f} |")


if __name__ == "__main__":
    main()
