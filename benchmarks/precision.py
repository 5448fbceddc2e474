"""Frozen layers in 8 bits against bf16, in one run: a training step's time, memory and kernels; errors of its results.

    python benchmarks/precision.py speed                       # CUDA: FLUX 12B; CPU: scaled down
    python benchmarks/precision.py speed --model qwen --rows "four, 45 %:recomputed"
    python benchmarks/precision.py errors                      # of the output and of the LoRA's gradient, by layer kind
    python benchmarks/precision.py errors --demo               # the same of the demo's trained base, on the CPU

The batches are those of `mixed_batch.py`; weights are random but for the demo's. "Two copies" keeps every weight turned
beside the weight itself, which `ragged/eightbit` turns each time it is needed. Sampling: `predict_batch.py`.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from mixed_batch import BATCHES, FULL, SMALL, Batch, Scale, build_model, inputs_of, measure, training_step
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qflux.adapters.lora import inject, trainable
from qflux.config import LoraSettings
from qflux.demo.run import SMALL as DEMO
from qflux.memory.recomputation import recompute
from qflux.models import get_family
from qflux.models.precision import EIGHT_BITS, compute_in_eight_bits
from qflux.ragged.compilation import compile_blocks

CLASSES = {
    "attention": r"flash|fmha|sdpa|attn",
    "around products": r"_in_rows|_gelu_|turned",
    "products": r"gemm|nvjet|cutlass|xmma|gemv|int8_product|splitk",
    "pointwise, compiled": r"^triton",
}
"""What the name of a kernel says about it; the first that matches."""
KINDS = {
    "attention's projections": r"to_[qkv]|add_[qkv]_proj|to_out|to_add_out|to_qkv",
    "MLPs": r"ff|mlp|proj_out",
    "modulation": r"norm|mod",
    "all": r"",
}


def batch_of(scale: Scale, name: str) -> Batch:
    count = len(BATCHES[name])
    texts = [n // scale.divide for n in (scale.text_lengths * count)[:count]]
    return Batch([n // scale.divide for n in BATCHES[name]], texts)


def set_up(model: Any, scale: Scale, device: str, recomputed: bool) -> None:
    blocks = get_family(scale.family).blocks(model)
    for block in blocks:
        block._compiled_call_impl = None
    model.disable_gradient_checkpointing()
    if recomputed:
        recompute(model, {id(block) for block in blocks})
    if device == "cuda":
        torch._dynamo.reset()
        compile_blocks(blocks)


def time_by_class(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds on the GPU, by class."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA:
            name = event.name.lower()
            which = next((each for each, pattern in CLASSES.items() if re.search(pattern, name)), "other")
            found[which] += event.device_time / 1000
    return dict(found)


@contextmanager
def two_copies() -> Iterator[None]:
    """Every weight is turned once, and stays so beside itself."""
    if not torch.cuda.is_available():
        yield
        return
    from qflux.ragged.eightbit import kernels  # noqa: PLC0415  (needs Triton)

    original, kept = kernels.turned, {}

    def turned(weight: Tensor) -> Tensor:
        key = weight.data_ptr(), weight.shape
        if key not in kept:
            kept[key] = original(weight)
        return kept[key]

    kernels.turned = turned
    try:
        yield
    finally:
        kernels.turned = original


def speed(scale: Scale, device: str, precisions: list[str], rows: list[str]) -> None:
    classes = [*CLASSES, "other"]
    heads = [
        "batch",
        "blocks",
        "precision",
        "weights GiB",
        "first step s",
        "ms/step",
        "bf16 / it",
        "peak GiB",
        *classes,
    ]
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    baseline: dict[str, float] = {}
    for precision in precisions:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        model = build_model(scale, device)
        if precision != "bf16":
            compute_in_eight_bits(get_family(scale.family).blocks(model), precision.partition(",")[0])
        weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
        for row in rows:
            name, _, how = row.partition(":")
            if "," in precision and how == "recomputed":
                continue  # two copies are of the step that has memory for them
            set_up(model, scale, device, how == "recomputed")
            step = training_step(model, scale, batch_of(scale, name), "packed", device)
            begun = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            first = time.perf_counter() - begun
            with two_copies() if "two" in precision else _nothing():
                seconds, gib = measure(step, scale, device, 2)
                by_class = time_by_class(step) if device == "cuda" else {}
            baseline.setdefault(row, seconds)
            cells = [
                name,
                how,
                precision,
                f"{weights:.1f}",
                f"{first:.0f}",
                f"{seconds * 1000:,.0f}",
                f"{baseline[row] / seconds:.2f}x",
                f"{gib:.1f}",
                *(f"{by_class.get(each, 0):.0f}" for each in classes),
            ]
            table.append(f"| {' | '.join(cells)} |")
            print(table[-1], flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        del model, step
    print("\n" + "\n".join(table))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def errors(model: Any, scale: Scale, batch: Batch, device: str) -> None:
    """Each kind of layers in 8 bits, the others as they were: what becomes of the output and of the gradient."""
    torch.manual_seed(2)
    for name, parameter in trainable(model).items():
        if "lora_B" in name:  # zeros at first, which would leave lora_A without a gradient
            nn.init.normal_(parameter, std=0.01)
    blocks = get_family(scale.family).blocks(model)
    layers = [
        (name, layer)
        for block in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and ".lora_" not in name
    ]
    whole = [(layer, type(layer), layer.weight) for _, layer in layers]
    recompute(model, {id(block) for block in blocks})
    output, gradient = results(model, scale, batch, device)
    table = ["| layers in 8 bits | precision | output, relative error | LoRA gradient, cosine | relative error |"]
    table.append("|---" * 5 + "|")
    for precision in EIGHT_BITS:
        for kind, pattern in KINDS.items():
            compute_in_eight_bits(blocks, precision)
            for (name, layer), (_, cls, weight) in zip(layers, whole, strict=True):
                if not _is(name, kind, pattern):
                    layer.__class__, layer.weight = cls, weight
            out, grad = results(model, scale, batch, device)
            cosine = F.cosine_similarity(grad.double(), gradient.double(), dim=0)
            table.append(
                f"| {kind} | {precision} | {_apart(out, output):.2%} | {cosine:.4f} | {_apart(grad, gradient):.2%} |"
            )
            print(table[-1], flush=True)
            for layer, cls, weight in whole:
                layer.__class__, layer.weight = cls, weight
    print("\n" + "\n".join(table))


def _is(name: str, kind: str, pattern: str) -> bool:
    first = next(each for each, found in KINDS.items() if re.search(found, name))
    return kind == "all" or (first == kind and bool(re.search(pattern, name)))


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def results(model: Any, scale: Scale, batch: Batch, device: str) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of all of the LoRA."""
    inputs = inputs_of(model, scale, batch, device)
    out = get_family(scale.family).velocity(model, inputs)
    torch.manual_seed(1)
    (out - torch.randn_like(out)).float().square().mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in trainable(model).values() if p.grad is not None])
    model.zero_grad()
    return out.detach().float().flatten(), gradient


def demo_model() -> tuple[Any, Scale]:
    """The base that ships with qflux, with the LoRA of its demo."""
    family = get_family(DEMO.family)
    model = family.transformer.from_pretrained(DEMO.folder / "transformer")
    inject(model, LoraSettings(rank=16), DEMO.lora_targets, seed=0)
    shape = {"joint_attention_dim": model.config.joint_attention_dim}
    return model.train(), Scale("the demo's base", DEMO.family, shape, (16,) * 4, 32, torch.float32, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "errors"])
    parser.add_argument("--model", choices=sorted(FULL), default="flux")
    parser.add_argument("--precisions", nargs="*", default=["bf16", "fp8", "fp8, two copies", "int8"])
    parser.add_argument(
        "--rows",
        nargs="*",
        default=["four, 45 %:stored", "four, 45 %:recomputed", "sixteen small:recomputed"],
    )
    parser.add_argument("--demo", action="store_true", help="errors of the demo's trained base")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not arguments.demo else "cpu"
    scale = (FULL if device == "cuda" else SMALL)[arguments.model]
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    if arguments.demo:
        model, scale = demo_model()
        print(f"{scale.name}, {machine}, torch {torch.__version__}\n", flush=True)
        errors(model, scale, batch_of(scale, "four, 45 %"), device)
        return
    print(f"{scale.name}, LoRA rank 16, {machine}, torch {torch.__version__}, median of {scale.repeats}\n", flush=True)
    if arguments.what == "errors":
        errors(build_model(scale, device), scale, batch_of(scale, "four, 45 %"), device)
    else:
        speed(scale, device, arguments.precisions, arguments.rows)


if __name__ == "__main__":
    main()
