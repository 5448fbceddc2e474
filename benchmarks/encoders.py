"""What encoding several images or prompts at once gains: why `cache.batch_size` is 1 unless you ask.

    python benchmarks/encoders.py          # CUDA: encoders of the published sizes, random weights, bfloat16

"gain" is the throughput of a batch over that of one at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL
from transformers import T5Config, T5EncoderModel

T5_XXL = T5Config(
    d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, feed_forward_proj="gated-gelu", vocab_size=32128
)


def on_device(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        model = make()
    model = model.to(torch.bfloat16).to_empty(device="cuda").eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02)
    return model


def flux_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def seconds(work: Callable[[], Any]) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, median of 10\n")
    print("| encoder | input | one at a time | batch of 4 | gain | batch of 8 | gain |\n|---|---|---|---|---|---|---|")

    def row(name: str, what: str, run: Callable[[int], Any]) -> None:
        alone, four, eight = (seconds(lambda n=n: run(n)) / n for n in (1, 4, 8))  # type: ignore[misc]
        cells = f"{alone * 1e3:.1f} ms | {four * 1e3:.1f} ms | {alone / four:.2f}x | {eight * 1e3:.1f} ms"
        print(f"| {name} | {what} | {cells} | {alone / eight:.2f}x |", flush=True)

    vae = on_device(flux_vae)
    for side in (512, 1024):
        images = torch.randn(8, 3, side, side, device="cuda", dtype=torch.bfloat16)
        row("FLUX VAE", f"{side}x{side}", lambda n, images=images: vae.encode(images[:n]))  # type: ignore[misc]
    t5 = on_device(lambda: T5EncoderModel(T5_XXL))
    tokens = torch.randint(0, 32000, (8, 512), device="cuda")
    row("T5 XXL", "512 tokens", lambda n: t5(tokens[:n]))


if __name__ == "__main__":
    main()
