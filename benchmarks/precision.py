"""Frozen layers in 8 bits against bf16, in one run: a training step's time, memory and kernels; errors of its results.

    python benchmarks/precision.py speed                       # CUDA: FLUX 12B; CPU: scaled down
    python benchmarks/precision.py speed --model qwen --rows "four, 45 %:recomputed"
    python benchmarks/precision.py errors                      # of the output and of the LoRA's gradient, by layer kind
    python benchmarks/precision.py demo                        # the same of the demo's model, and its edits

The batches are those of `mixed_batch.py`; weights are random but for the demo's. "Two copies" keeps every weight turned
beside the weight itself, which `ragged/eightbit` turns each time it is needed. Sampling: `predict_batch.py`.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mixed_batch import BATCHES, FULL, SMALL, Scale, build_model, inputs_of, measure, training_step
from mixed_batch import Batch as RandomBatch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qflux.adapters.attach import Weighted
from qflux.adapters.lora import trainable
from qflux.capacity.planner import without_a_card
from qflux.commands import Trainer
from qflux.data.batch import Batch
from qflux.data.images.decode import load_rgb
from qflux.data.sample import Sample
from qflux.demo.run import demo_config
from qflux.losses.objective import Objective
from qflux.memory.recomputation import recompute
from qflux.models import get_family
from qflux.models.precision import EIGHT_BITS, compute_in_eight_bits
from qflux.pictures.drawing import GridRow, edit_grid, write_png
from qflux.ragged.compilation import compile_blocks
from qflux.sampling.predictor import Edit
from qflux.training.batches import Batches
from qflux.training.distributed import World
from qflux.training.fit import chart
from qflux.training.model import TrainedModel, load_to_train

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


def batch_of(scale: Scale, name: str) -> RandomBatch:
    count = len(BATCHES[name])
    texts = [n // scale.divide for n in (scale.text_lengths * count)[:count]]
    return RandomBatch([n // scale.divide for n in BATCHES[name]], texts)


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


Results = Callable[[], tuple[Tensor, Tensor]]
"""The output of a model, and the gradient of all of its LoRA."""


def errors(model: Any, blocks: Sequence[Any], results: Results) -> None:
    """Each kind of layers in 8 bits, the others as they were: what becomes of the output and of the gradient."""
    layers = [
        (name, layer)
        for block in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and ".lora_" not in name
    ]
    whole = [(layer, type(layer), layer.weight) for _, layer in layers]
    recompute(model, {id(block) for block in blocks})
    output, gradient = results()
    table = ["| layers in 8 bits | precision | output, relative error | LoRA gradient, cosine | relative error |"]
    table.append("|---" * 5 + "|")
    for precision in EIGHT_BITS:
        for kind, pattern in KINDS.items():
            compute_in_eight_bits(blocks, precision)
            for (name, layer), (_, cls, weight) in zip(layers, whole, strict=True):
                if not _is(name, kind, pattern):
                    layer.__class__, layer.weight = cls, weight
            out, grad = results()
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


def of_random_weights(model: Any, scale: Scale, device: str) -> Results:
    """Of a batch of random numbers."""
    torch.manual_seed(2)
    for name, parameter in trainable(model).items():
        if "lora_B" in name:  # zeros at first, which would leave lora_A without a gradient
            nn.init.normal_(parameter, std=0.01)
    inputs = inputs_of(model, scale, batch_of(scale, "four, 45 %"), device)

    def results() -> tuple[Tensor, Tensor]:
        out = get_family(scale.family).velocity(model, inputs)
        torch.manual_seed(1)
        return out.detach().float().flatten(), gradient(model, (out - torch.randn_like(out)).float().square().mean())

    return results


def gradient(model: Any, loss: Tensor) -> Tensor:
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in trainable(model).values() if p.grad is not None])
    model.zero_grad()
    return found


def demo(folder: Path) -> None:
    """Errors of the demo's base on its own samples, when its LoRA begins and when it ends; its edits in each."""
    trainer = Trainer(demo_config(folder, ["run_name=precision", "train.preflight=false"]))
    adapter = folder / "night" / "adapter"
    if not adapter.exists():
        sys.exit(f"there is no {adapter}: run qflux demo first")
    config, pretrained, dataset, world = trainer.config, trainer.pretrained, trainer.samples(), World()
    course, choice = chart(config, pretrained, dataset, world, False), without_a_card(config)
    for which, start in {"before its first step": None, "that has learnt": adapter}.items():
        transformer = load_to_train(config, pretrained, world, choice)
        model = TrainedModel(transformer, trainer.family, config, world, trainer.device, choice, start)
        channels = trainer.family.widths(transformer).image
        batches = Batches(
            config, course.plan, dataset.training, course.reader, course.levels, channels, world, trainer.device
        )
        shown = [batch for step in batches.steps(0, 8) for batch in step]
        print(f"\nthe demo's base, a LoRA {which}, {len(shown)} batches, CPU, torch {torch.__version__}\n")
        errors(transformer, trainer.family.blocks(transformer), of_batches(model, shown, Objective(config.loss)))
    draw(folder, [sample for sample in dataset.held_out if sample.images])


def of_batches(model: TrainedModel, shown: Sequence[Batch], objective: Objective) -> Results:
    """Of batches as training has them."""

    def results() -> tuple[Tensor, Tensor]:
        out = [model.velocity(batch) for batch in shown]
        loss = torch.stack([objective(one, batch)[0] for one, batch in zip(out, shown, strict=True)]).sum()
        return torch.cat([one.detach().flatten() for one in out]), gradient(model.transformer, loss)

    return results


def draw(folder: Path, samples: Sequence[Sample]) -> None:
    """Held-out edits, the same noise in each precision."""
    edits = [
        Edit(tuple(load_rgb(control.ref) for control in sample.own_images.controls), sample.prompt, seed=seed)
        for seed, sample in enumerate(samples)
    ]
    adapter = [Weighted(folder / "night" / "adapter")]
    drawn = {
        name: Trainer(demo_config(folder, [f"model.precision={name}"])).predictor(adapter)(edits)
        for name in ("null", *EIGHT_BITS)
    }
    pixels = {name: [torch.from_numpy(np.array(image)).float() for image in found] for name, found in drawn.items()}
    print("\n| edits in | PSNR with those in float32: lowest, mean |\n|---|---|")
    for name in EIGHT_BITS:
        noise = [(a - b).square().mean() for a, b in zip(pixels[name], pixels["null"], strict=True)]
        decibels = [10 * math.log10(255**2 / float(each)) for each in noise]
        print(f"| {name} | {min(decibels):.1f}, {sum(decibels) / len(decibels):.1f} dB |")
    columns = {"float32": "null", **{name: name for name in EIGHT_BITS}}
    given = [
        {"control": edit.controls[0]} | {title: drawn[name][k] for title, name in columns.items()}
        for k, edit in enumerate(edits[:4])
    ]
    rows = [GridRow(edit.prompt, images) for edit, images in zip(edits, given, strict=False)]
    print(write_png(folder / "precision.png", edit_grid(rows, ["control", *columns])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "errors", "demo"])
    parser.add_argument("--model", choices=sorted(FULL), default="flux")
    parser.add_argument("--precisions", nargs="*", default=["bf16", "fp8", "fp8, two copies", "int8"])
    parser.add_argument(
        "--rows",
        nargs="*",
        default=["four, 45 %:stored", "four, 45 %:recomputed", "sixteen small:recomputed"],
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="of the demo")
    arguments = parser.parse_args()
    if arguments.what == "demo":
        demo(arguments.folder)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = (FULL if device == "cuda" else SMALL)[arguments.model]
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{scale.name}, LoRA rank 16, {machine}, torch {torch.__version__}, median of {scale.repeats}\n", flush=True)
    if arguments.what == "errors":
        model = build_model(scale, device)
        errors(model, get_family(scale.family).blocks(model), of_random_weights(model, scale, device))
    else:
        speed(scale, device, arguments.precisions, arguments.rows)


if __name__ == "__main__":
    main()
