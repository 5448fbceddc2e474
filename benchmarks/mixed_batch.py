"""One LoRA training step on samples of different sizes: packed against padded, and against one by one, in one run.

    python benchmarks/mixed_batch.py                     # CUDA: the full 12B shape; CPU: scaled down
    python benchmarks/mixed_batch.py --model qwen        # Qwen-Image 20B instead of FLUX 12B; or klein: FLUX.2 9B;
                                                         # flux3: FLUX.3 klein; qwen21: Qwen-Image-2.1
    python benchmarks/mixed_batch.py --rows packed       # some rows only

The batches are edits of 2 n image tokens (target and control), with 512 text tokens (FLUX) or 260 to 700 (Qwen): four
with n = 1024 / 1600 / 2304 / 4096 (45 % of a padded batch is padding), four with n = 1024 / 1600 / 1536 / 1872 (19 %),
and sixteen of 256 to 512 pixels, n = 256 to 1024. Weights are random: speed and memory do not depend on them.

"One by one" is what most people would do instead: batch size 1, gradients accumulated over the same samples, compiled,
in diffusers' own forward (which qflux's class runs for a single sample), or for FLUX.2, FLUX.3 and Qwen-Image-2.1 in
qflux's.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from qflux.adapters.lora import inject
from qflux.capacity.flops import PEAKS, StepFlops
from qflux.config import LoraSettings
from qflux.data.encoded import TextEmbedding
from qflux.models import QwenImageTransformer2DModel, get_family
from qflux.models.family import ModelInputs
from qflux.models.flux_kontext.positions import image_ids
from qflux.ragged.compilation import compile_blocks
from qflux.ragged.layout import PackedLayout, PaddedLayout, padding_ratio
from qflux.ragged.shapes import Shapes

BATCHES = {
    "four, 45 %": (1024, 1600, 2304, 4096),
    "four, 19 %": (1024, 1600, 1536, 1872),
    "sixteen small": (256, 384, 512, 640, 768, 896, 1024, 320, 448, 576, 704, 832, 960, 288, 1008, 400),
}


@dataclass(frozen=True)
class Scale:
    """The size of one benchmark: the model, how many tokens the batches are divided by, and their text lengths."""

    name: str
    family: str
    shape: dict[str, Any]
    """What the transformer is made with."""
    text_lengths: tuple[int, ...]
    divide: int
    dtype: torch.dtype
    repeats: int

    @property
    def text_width(self) -> int:
        return int(self.shape.get("joint_attention_dim") or self.shape["context_in_dim"])


FLUX_TEXT, QWEN_TEXT = (512,) * 4, (260, 400, 560, 700)
FLUX3_TEXT, QWEN21_TEXT = (80, 160, 240, 160), (40, 90, 160, 60)


def _shape(layers: int, single_layers: int, heads: int, text_width: int, **more: Any) -> dict[str, Any]:
    shape = {"num_layers": layers, "num_attention_heads": heads, "joint_attention_dim": text_width, **more}
    return {**shape, "num_single_layers": single_layers} if single_layers else shape


_FLUX, _KLEIN = {"guidance_embeds": True}, {"guidance_embeds": False}
_QWEN21 = {"num_layers": 32, "num_attention_heads": 32, "context_in_dim": 4096}
_QWEN21_SMALL = {"num_layers": 6, "num_attention_heads": 4, "context_in_dim": 256}
FULL = {
    "flux": Scale("FLUX 12B", "flux-kontext", _shape(19, 38, 24, 4096, **_FLUX), FLUX_TEXT, 1, torch.bfloat16, 3),
    "klein": Scale("FLUX.2 klein 9B", "flux2", _shape(8, 24, 32, 12288, **_KLEIN), FLUX_TEXT, 1, torch.bfloat16, 3),
    "qwen": Scale("Qwen-Image 20B", "qwen-image-edit", _shape(60, 0, 24, 3584), QWEN_TEXT, 1, torch.bfloat16, 3),
    "flux3": Scale("FLUX.3 klein", "flux3", _shape(5, 28, 24, 20480), FLUX3_TEXT, 1, torch.bfloat16, 3),
    "qwen21": Scale("Qwen-Image-2.1 7B", "qwen-image-2.1", _QWEN21, QWEN21_TEXT, 1, torch.bfloat16, 3),
}
SMALL = {
    "flux": Scale("FLUX scaled down", "flux-kontext", _shape(2, 4, 4, 256, **_FLUX), FLUX_TEXT, 4, torch.float32, 3),
    "klein": Scale("klein scaled down", "flux2", _shape(2, 4, 4, 768, **_KLEIN), FLUX_TEXT, 4, torch.float32, 3),
    "qwen": Scale("Qwen-Image scaled down", "qwen-image-edit", _shape(6, 0, 4, 256), QWEN_TEXT, 4, torch.float32, 3),
    "flux3": Scale("FLUX.3 scaled down", "flux3", _shape(2, 4, 4, 256), FLUX3_TEXT, 4, torch.float32, 3),
    "qwen21": Scale("2.1 scaled down", "qwen-image-2.1", _QWEN21_SMALL, QWEN21_TEXT, 4, torch.float32, 3),
}


@dataclass
class Batch:
    """Four edits: target and control of n tokens each, and their text."""

    targets: list[int]
    text_lengths: list[int]

    def __post_init__(self) -> None:
        self.shapes = [Shapes(((1, n // 16, 16),), ((1, n // 16, 16),)) for n in self.targets]

    @property
    def image_lengths(self) -> list[int]:
        return [shapes.tokens for shapes in self.shapes]

    @property
    def lengths(self) -> list[int]:
        return [text + image for text, image in zip(self.text_lengths, self.image_lengths, strict=True)]


def build_transformer(scale: Scale, device: str) -> Any:
    """Random weights, frozen."""
    with torch.device("meta"):
        model = get_family(scale.family).transformer(**scale.shape)
    model = model.to(scale.dtype).to_empty(device=device).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02)
    if hasattr(model.pos_embed, "freqs") or isinstance(model, QwenImageTransformer2DModel):
        # Its tables are plain attributes, made on the meta device.
        options = {"scale_rope": True} if isinstance(model, QwenImageTransformer2DModel) else {}
        model.pos_embed = type(model.pos_embed)(theta=10000, axes_dim=[16, 56, 56], **options)
    return model


def build_model(scale: Scale, device: str) -> Any:
    """The same with a LoRA."""
    model = build_transformer(scale, device)
    inject(model, LoraSettings(rank=16), get_family(scale.family).facts.lora_targets, seed=0)
    return model.train()


def inputs_of(model: Any, scale: Scale, batch: Batch, device: str, padded: bool = False) -> ModelInputs:
    """Random ones."""
    options: dict[str, Any] = {"device": device, "dtype": scale.dtype}
    torch.manual_seed(0)
    channels = get_family(scale.family).widths(model).image
    image = torch.randn(sum(batch.image_lengths), channels, **options)
    text = [
        TextEmbedding(torch.randn(n, scale.text_width, **options), torch.randn(768, **options), places=(n // 4,))
        for n in batch.text_lengths
    ]
    return ModelInputs(image, batch.shapes, text, torch.rand(len(text), device=device), 3.5, padded=padded)


def training_step(model: Any, scale: Scale, batch: Batch, mode: str, device: str) -> Callable[[], None]:
    """A closure that does one optimizer step in `mode`; "diffusers" is its own forward on the padded batch."""
    inputs = inputs_of(model, scale, batch, device, mode == "padded")
    image, text, count = inputs.images, inputs.text, len(batch.targets)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    goal = torch.randn_like(image)
    velocity = get_family(scale.family).velocity

    def one_by_one() -> None:
        images, goals = image.split(batch.image_lengths), goal.split(batch.image_lengths)
        for number in range(count):
            alone = ModelInputs(
                images[number],
                batch.shapes[number : number + 1],
                text[number : number + 1],
                inputs.sigma[number, None],
                3.5,
            )
            loss = (velocity(model, alone) - goals[number]).float().square().sum() / goal.numel()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        predicted = stock_velocity(model, inputs) if mode == "diffusers" else velocity(model, inputs)
        (predicted - goal).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return one_by_one if mode == "one by one" else step


def stock_velocity(model: Any, inputs: ModelInputs) -> Tensor:
    """diffusers' own FLUX forward on the padded batch with a mask, for its time: all samples share their positions."""
    lengths, images = [len(t.tokens) for t in inputs.text], [shapes.images for shapes in inputs.shapes]
    padded = PaddedLayout.of(PackedLayout.from_shapes(lengths, images, inputs.images.device))
    count = padded.batch_size
    tokens = padded.enter_image(inputs.images).unflatten(0, (count, -1))
    texts = padded.enter_text(torch.cat([item.tokens for item in inputs.text])).unflatten(0, (count, -1))
    output = diffusers.FluxTransformer2DModel.forward(
        model,
        tokens,
        texts,
        pooled_projections=torch.stack([item.pooled for item in inputs.text if item.pooled is not None]),
        timestep=inputs.sigma,
        guidance=torch.full_like(inputs.sigma, inputs.guidance),
        img_ids=image_ids([Shapes(((1, tokens.shape[1], 1),))], tokens.device),
        txt_ids=torch.zeros(texts.shape[1], 3, device=tokens.device),
        joint_attention_kwargs={"attention_mask": padded.mask[:, None, None, :]},
    )
    return padded.leave_image(output.sample.flatten(0, 1))


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
    with peak_memory(device) as peak:
        seconds = median_seconds(step, scale.repeats, device)
    return seconds, peak[0]


def median_seconds(work: Callable[[], Any], repeats: int, device: str) -> float:
    """Each time until the device is done."""
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


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
    ("one by one", True, True),
    ("packed", True, True),
    ("diffusers", False, True),
    ("padded", True, False),
    ("one by one", True, False),
    ("packed", True, False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(FULL), default="flux")
    parser.add_argument("--rows", nargs="*", default=sorted({mode for mode, *_ in ROWS}), help="modes to run")
    parser.add_argument("--batches", nargs="*", default=list(BATCHES), help="batches to run")
    parser.add_argument("--compiled", action="store_true", help="only rows with compiled blocks")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = (FULL if device == "cuda" else SMALL)[arguments.model]
    peak = PEAKS["H200"] if device == "cuda" else cpu_peak()
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{scale.name}, LoRA rank 16, {scale.dtype}, {machine}, torch {torch.__version__}; ", end="")
    print(f"tokens / {scale.divide}, peak {peak / 1e12:.2f} TFLOP/s, median of {scale.repeats}\n", flush=True)

    model = build_model(scale, device)
    flops = StepFlops(get_family(scale.family).arithmetic(model), trains_all=False)
    table = [
        "| batch (padding) | mode | blocks | checkpointing | s/step | padded / it | one by one / it | peak GiB | MFU |",
        "|---" * 9 + "|",
    ]
    for name in arguments.batches:
        count = len(BATCHES[name])
        texts = [n // scale.divide for n in (scale.text_lengths * count)[:count]]
        batch = Batch([n // scale.divide for n in BATCHES[name]], texts)
        baseline: dict[tuple[str, bool, bool], float] = {}
        pairs = sum(map(get_family(scale.family).pairs, batch.text_lengths, batch.shapes))
        for mode, compiled, checkpointing in ROWS:
            if mode not in arguments.rows or (arguments.compiled and not compiled):
                continue
            if device == "cpu" and (compiled or not checkpointing):
                continue
            if name not in ("four, 45 %", "four, 19 %") and (not compiled or mode in ("padded", "diffusers")):
                continue  # what is slow anyway
            if mode == "diffusers" and arguments.model != "flux":  # stock_velocity is FLUX.1's
                continue
            # cuDNN attention crashes on a padded, masked, checkpointed 12B batch (torch 2.11).
            torch.backends.cuda.enable_cudnn_sdp(mode in ("packed", "one by one"))
            set_execution(model, scale, compiled, checkpointing)
            try:
                seconds, gib = measure(training_step(model, scale, batch, mode, device), scale, device, 1 + compiled)
            except torch.OutOfMemoryError:
                print(f"{name}: {mode}, checkpointing {checkpointing}: out of memory", flush=True)
                model.zero_grad()
                gc.collect()
                torch.cuda.empty_cache()
                continue
            baseline[mode, compiled, checkpointing] = seconds
            cells = (
                f"{name} ({padding_ratio(batch.image_lengths):.1%})",
                mode,
                "compiled" if compiled else "eager",
                "full" if checkpointing else "off",
                f"{seconds:.2f}",
                *(
                    _ratio(baseline.get((rival, compiled, checkpointing)), seconds)
                    for rival in ("padded", "one by one")
                ),
                f"{gib:.1f}",
                f"{flops(sum(batch.lengths), pairs) / seconds / peak:.1%}",
            )
            table.append(f"| {' | '.join(cells)} |")
            print(table[-1], flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    print("\n" + "\n".join(table))


def _ratio(rival: float | None, seconds: float) -> str:
    return "–" if rival is None else f"{rival / seconds:.2f}x"


def set_execution(model: Any, scale: Scale, compiled: bool, checkpointing: bool) -> None:
    blocks = get_family(scale.family).blocks(model)
    for block in blocks:
        block._compiled_call_impl = None
    if compiled:
        compile_blocks(blocks)
    if checkpointing:
        model.enable_gradient_checkpointing()
    else:
        model.disable_gradient_checkpointing()


if __name__ == "__main__":
    main()
