"""One LoRA training step on samples of different sizes: padded against packed, in one run.

    python benchmarks/mixed_batch.py                     # CUDA: the full 12B shape; CPU: scaled down
    python benchmarks/mixed_batch.py --rows packed       # some rows only

The batches are four edits, 512 text tokens and 2 n image tokens (target and control) each:
n = 1024 / 1600 / 2304 / 4096 (45 % of a padded batch is padding) and n = 1024 / 1600 / 1536 / 1872 (19 %).
Weights are random: speed and memory do not depend on them.

Model-FLOP utilisation counts the arithmetic of valid tokens only (forward once, backward through frozen weights once,
no recomputation) over the device's peak, so that work on padding is not rewarded.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import diffusers
import torch
from torch import Tensor

from qflux.adapters.lora import inject
from qflux.config import LoraSettings
from qflux.models.flux_kontext.transformer import FluxTransformer2DModel
from qflux.ragged.layout import PackedLayout, PaddedLayout, padding_ratio
from qflux.ragged.rope import image_ids

H200_PEAK = 989e12
BATCHES = {"45 %": (1024, 1600, 2304, 4096), "19 %": (1024, 1600, 1536, 1872)}


@dataclass(frozen=True)
class Scale:
    """The size of one benchmark: the model, and how many tokens the batches are divided by."""

    name: str
    layers: int
    single_layers: int
    heads: int
    text_width: int
    divide: int
    dtype: torch.dtype
    repeats: int

    @property
    def width(self) -> int:
        return self.heads * 128


FULL = Scale("FLUX 12B", 19, 38, 24, 4096, 1, torch.bfloat16, 3)
SMALL = Scale("FLUX scaled down", 2, 4, 4, 256, 4, torch.float32, 3)


@dataclass
class Batch:
    """Four edits as packed tokens."""

    targets: list[int]
    text_length: int
    layout: PackedLayout = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = [[(1, n // 16, 16), (1, n // 16, 16)] for n in self.targets]
        self.layout = PackedLayout.from_shapes([self.text_length] * len(self.targets), self.shapes)

    @property
    def lengths(self) -> list[int]:
        return [self.text_length + 2 * n for n in self.targets]


def build_model(scale: Scale, device: str) -> FluxTransformer2DModel:
    with torch.device("meta"):
        model = FluxTransformer2DModel(
            num_layers=scale.layers,
            num_single_layers=scale.single_layers,
            num_attention_heads=scale.heads,
            joint_attention_dim=scale.text_width,
            guidance_embeds=True,
        )
    model = model.to(scale.dtype).to_empty(device=device).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02)
    inject(model, LoraSettings(rank=16), seed=0)
    return model.train()


def training_step(
    model: FluxTransformer2DModel, scale: Scale, batch: Batch, mode: str, device: str
) -> Callable[[], None]:
    """A closure that does one optimizer step in `mode`: packed, padded, or padded through diffusers' own forward."""
    count = len(batch.targets)
    torch.manual_seed(0)
    image = torch.randn(sum(batch.layout.image_lengths), 64, device=device, dtype=scale.dtype)
    text = torch.randn(sum(batch.layout.text_lengths), scale.text_width, device=device, dtype=scale.dtype)
    pooled = torch.randn(count, 768, device=device, dtype=scale.dtype)
    sigma, guidance = torch.rand(count, device=device), torch.full((count,), 3.5, device=device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    goal = torch.randn_like(image)

    packed = PackedLayout.from_shapes(batch.layout.text_lengths, batch.shapes, device)
    padded = PaddedLayout.of(packed)

    def predict() -> Tensor:
        if mode == "diffusers":
            conditions = {"pooled_projections": pooled, "timestep": sigma, "guidance": guidance}
            return padded.leave_image(stock_forward(model, padded, image, text, **conditions))
        layout = padded if mode == "padded" else packed
        ids, text_ids = image_ids(batch.shapes, device), torch.zeros(len(text), 3, device=device)
        return model(image, text, pooled, sigma, ids, text_ids, guidance, layout=layout, return_dict=False)[0]

    def step() -> None:
        (predict() - goal).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def stock_forward(
    model: FluxTransformer2DModel, padded: PaddedLayout, image: Tensor, text: Tensor, **conditions: Tensor
) -> Tensor:
    """diffusers' forward on the padded batch with a mask, for its time: all samples share one set of positions."""
    count = padded.batch_size
    images, texts = (x.unflatten(0, (count, -1)) for x in (padded.enter_image(image), padded.enter_text(text)))
    output = diffusers.FluxTransformer2DModel.forward(
        model,
        images,
        texts,
        img_ids=image_ids([[(1, images.shape[1], 1)]], image.device),
        txt_ids=torch.zeros(texts.shape[1], 3, device=image.device),
        joint_attention_kwargs={"attention_mask": padded.key_mask[:, None, None, :]},
        **conditions,
    )
    return output.sample.flatten(0, 1)


def model_flops(scale: Scale, batch: Batch) -> float:
    """Forward and backward arithmetic on valid tokens; frozen weights need no gradient of their own."""
    layers, width = scale.layers + scale.single_layers, scale.width
    linear = 24 * width**2 * sum(batch.lengths) * layers
    attention = sum(4 * width * n * n for n in batch.lengths) * layers
    return 2 * linear + 3 * attention


@contextmanager
def peak_memory(device: str) -> Iterator[list[float]]:
    """Peak memory in GiB: allocated on CUDA, resident (sampled every few milliseconds) on the CPU."""
    result: list[float] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield result
        result.append(torch.cuda.max_memory_allocated() / 2**30)
        return
    done, peak, page = threading.Event(), [0], os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], int(Path("/proc/self/statm").read_text().split()[1]) * page)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield result
    done.set()
    watcher.join()
    result.append(peak[0] / 2**30)


def measure(step: Callable[[], None], scale: Scale, device: str, warmup: int) -> tuple[float, float]:
    """Median seconds of a step, and peak memory in GiB."""
    for _ in range(warmup):
        step()
    times = []
    with peak_memory(device) as peak:
        for _ in range(scale.repeats):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return statistics.median(times), peak[0]


def cpu_peak() -> float:
    """Arithmetic a large fp32 matrix product reaches here, in FLOP/s."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


ROWS = (
    # mode, compiled blocks, checkpointing
    ("padded", False, True),
    ("packed", False, True),
    ("padded", True, True),
    ("packed", True, True),
    ("diffusers", False, True),
    ("packed, all activations", True, False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=sorted({mode for mode, *_ in ROWS}), help="modes to run")
    parser.add_argument("--batches", nargs="*", default=list(BATCHES), help="batches to run")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = FULL if device == "cuda" else SMALL
    peak = H200_PEAK if device == "cuda" else cpu_peak()
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{scale.name}, LoRA rank 16, {scale.dtype}, {machine}, torch {torch.__version__}; ", end="")
    print(f"tokens / {scale.divide}, peak {peak / 1e12:.2f} TFLOP/s, median of {scale.repeats}\n", flush=True)

    model = build_model(scale, device)
    table = [
        "| padding | mode | blocks | checkpointing | s/step | against padded | peak GiB | MFU |",
        "|---|" * 1 + "---|" * 7,
    ]
    for name in arguments.batches:
        batch = Batch([n // scale.divide for n in BATCHES[name]], 512 // scale.divide)
        baseline: dict[bool, float] = {}
        for mode, compiled, checkpointing in ROWS:
            if mode not in arguments.rows or (device == "cpu" and (compiled or not checkpointing)):
                continue
            # cuDNN attention crashes on a padded, masked, checkpointed 12B batch (torch 2.11).
            torch.backends.cuda.enable_cudnn_sdp(mode.startswith("packed"))
            set_execution(model, compiled, checkpointing)
            seconds, gib = measure(training_step(model, scale, batch, mode, device), scale, device, 1 + compiled)
            if mode == "padded":
                baseline[compiled] = seconds
            cells = (
                f"{name} ({padding_ratio(batch.layout.image_lengths):.1%})",
                mode,
                "compiled" if compiled else "eager",
                "full" if checkpointing else "off",
                f"{seconds:.2f}",
                f"{baseline[compiled] / seconds:.2f}x" if compiled in baseline else "-",
                f"{gib:.1f}",
                f"{model_flops(scale, batch) / seconds / peak:.1%}",
            )
            table.append(f"| {' | '.join(cells)} |")
            print(table[-1], flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    print("\n" + "\n".join(table))


def set_execution(model: FluxTransformer2DModel, compiled: bool, checkpointing: bool) -> None:
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        block._compiled_call_impl = None
        if compiled:
            block.compile(dynamic=True)
    if checkpointing:
        model.enable_gradient_checkpointing()
    else:
        model.disable_gradient_checkpointing()


if __name__ == "__main__":
    main()
