"""Is the memory of a step what was predicted, and is what the planner chooses the fastest?

    python benchmarks/capacity.py memory [--models flux klein …] [--compiled]     # predicted against measured peaks
    python benchmarks/capacity.py grid [--models flux]                            # the choice against all others

Needs CUDA. Full-size transformers with random weights and a LoRA of rank 16, bf16. The memory is that of the tensors
(`torch.cuda.max_memory_allocated`), after a step in which the optimizer has made its own.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mixed_batch import BATCHES, FULL, Batch, Scale, build_model, inputs_of, measure

from qflux.capacity.card import Card
from qflux.capacity.choice import Choice
from qflux.capacity.footprint import Footprint
from qflux.capacity.planner import choose
from qflux.config import Config, load_config
from qflux.data.cut import evenly, in_order
from qflux.memory.placing import GIB
from qflux.memory.recomputation import recompute
from qflux.models import get_family
from qflux.models.loading import empty_transformer
from qflux.ragged.compilation import compile_blocks

SIZES = {
    "one, 1024 px": (4096,),
    "two, 512 px": (1024, 1024 + 64),
    "four, 19 %": BATCHES["four, 19 %"],
    "four, 45 %": BATCHES["four, 45 %"],
    "sixteen small": BATCHES["sixteen small"],
}


def config_of(scale: Scale) -> Config:
    """A config whose checkpoint is a description without weights."""
    folder = Path(tempfile.mkdtemp())
    with torch.device("meta"):
        get_family(scale.family).transformer(**scale.shape).save_config(folder / "transformer")
    settings = {
        "family": scale.family,
        "model": {"pretrained": str(folder)},
        "data": {"path": str(folder)},
        "lora": {"rank": 16},
        "cache": {"project_text": False},
    }
    return load_config(settings)


def described(scale: Scale) -> tuple[Config, Any, Footprint]:
    """A config, what its transformer computes, and the memory that takes."""
    config, family = config_of(scale), get_family(scale.family)
    with torch.device("meta"):
        transformer = empty_transformer(family.transformer, config.model)
    return config, family.arithmetic(transformer), Footprint.of(config, family, transformer, max(scale.text_lengths))


def batch_of(scale: Scale, targets: Sequence[int], start: int = 0) -> Batch:
    texts = (scale.text_lengths * 16)[start : start + len(targets)]
    return Batch(list(targets), list(texts))


def set_recomputed(model: Any, scale: Scale, count: int) -> None:
    recompute(model, {id(block) for block in get_family(scale.family).blocks(model)[:count]})


def peak(model: Any, scale: Scale, batches: Sequence[Batch]) -> tuple[float, float]:
    """Seconds of a step in these passes, and its peak in GiB."""
    inputs = [inputs_of(model, scale, batch, "cuda") for batch in batches]
    goals = [torch.randn_like(each.images) for each in inputs]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    velocity = get_family(scale.family).velocity

    def step() -> None:
        for each, goal in zip(inputs, goals, strict=True):
            (velocity(model, each) - goal).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return measure(step, scale, "cuda", warmup=2)


def memory(names: Sequence[str], compiled: bool) -> None:
    print("| model | samples | tokens | blocks recomputed | predicted GiB | measured GiB | predicted / measured |")
    print("|---" * 7 + "|", flush=True)
    for name in names:
        scale = FULL[name]
        _, _, footprint = described(scale)
        model = build_model(scale, "cuda")
        if compiled:
            compile_blocks(get_family(scale.family).blocks(model))
        for samples, targets in SIZES.items():
            batch = batch_of(scale, targets)
            tokens = sum(batch.lengths)
            for count in (0, footprint.blocks // 2, footprint.blocks):
                predicted = footprint.peak(tokens, count, compiled)
                if predicted > 0.9 * torch.cuda.get_device_properties(0).total_memory:
                    continue
                set_recomputed(model, scale, count)
                _, measured = peak(model, scale, [batch])
                cells = (scale.name, samples, f"{tokens:,}", f"{count} of {footprint.blocks}")
                found = (f"{predicted / GIB:.1f}", f"{measured:.1f}", f"{predicted / GIB / measured:.3f}")
                print("|", " | ".join((*cells, *found)), "|", flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def grid(names: Sequence[str]) -> None:
    """Every cut into passes and several numbers of recomputed blocks, and what is chosen."""
    print("| model | step | passes | blocks recomputed | s/step | peak GiB | |")
    print("|---" * 7 + "|", flush=True)
    for name in names:
        scale = FULL[name]
        config, arithmetic, footprint = described(scale)
        card = Card.of(torch.device("cuda"), None)
        assert card is not None
        model = build_model(scale, "cuda")
        compile_blocks(get_family(scale.family).blocks(model))
        for samples in ("four, 45 %", "sixteen small"):
            whole = batch_of(scale, BATCHES[samples])
            choice, _ = choose(config, footprint, arithmetic, card, [[whole.lengths]], compiled=True)
            chosen = len(in_order(whole.lengths, choice.most_tokens or 0)), len(choice.recomputed(footprint.blocks))
            counts = sorted({1, 2, 3, len(whole.targets), chosen[0]})
            ways = [(passes, again) for passes in counts for again in sorted({0, footprint.blocks, chosen[1]})]
            for passes, again in ways:
                batches, start = [], 0
                for count in evenly(whole.lengths, passes):
                    batches.append(batch_of(scale, whole.targets[start : start + count], start))
                    start += count
                set_recomputed(model, scale, again)
                cells = (scale.name, samples, str(passes), f"{again} of {footprint.blocks}")
                try:
                    seconds, gib = peak(model, scale, batches)
                    found = (f"{seconds:.3f}", f"{gib:.1f}")
                except torch.OutOfMemoryError:
                    model.zero_grad()
                    gc.collect()
                    torch.cuda.empty_cache()
                    found = ("out of memory", "–")
                mark = "**chosen**" if (passes, again) == chosen else ""
                print("|", " | ".join((*cells, *found, mark)), "|", flush=True)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "grid"])
    parser.add_argument("--models", nargs="*", choices=sorted(FULL), default=["flux"])
    parser.add_argument("--compiled", action="store_true", help="memory: of compiled blocks")
    arguments = parser.parse_args()
    if arguments.what == "memory":
        memory(arguments.models, arguments.compiled)
    else:
        grid(arguments.models)


if __name__ == "__main__":
    main()
