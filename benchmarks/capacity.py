"""Does a run fit where the planner says it does, as it says it does, and is what it chooses the fastest?

    python benchmarks/capacity.py grid                    # a step on the whole card: the choice against others
    python benchmarks/capacity.py limited                 # the same samples with less and less memory
    python benchmarks/capacity.py limited --precision fp8 # the same, frozen layers computing in 8 bits
    python benchmarks/capacity.py others                  # prompts, images and edits within 12 GiB
    python benchmarks/capacity.py plans                   # what is chosen for common cards: the table of the docs

Needs CUDA, but for `plans`; without it a scaled-down model shows that the program works. Full-size models with random
weights, LoRA of rank 16, bfloat16, blocks compiled. "Predicted" is what `qflux check` would say; memory is that of the
tensors (`torch.cuda.max_memory_allocated`) after a step in which the optimizer has made its own. Limits are
`torch.cuda.set_per_process_memory_fraction`: the allocator gets no more.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from full_encoders import full_components
from mixed_batch import BATCHES, FULL, SMALL, Batch, Scale, build_model, inputs_of, measure

from qflux.capacity.card import Card
from qflux.capacity.choice import Choice
from qflux.capacity.footprint import Footprint
from qflux.capacity.planner import choose, predict
from qflux.config import Config, load_config
from qflux.data.cut import evenly, in_order
from qflux.data.encoded import Prompt, TextLimit
from qflux.memory.placing import GIB, limit_memory, model_bytes, place
from qflux.memory.recomputation import recompute
from qflux.memory.streaming import StreamedBlocks
from qflux.models import get_family
from qflux.models.encoding import encoder_of
from qflux.models.family import Arithmetic
from qflux.models.loading import empty_transformer
from qflux.models.precision import EIGHT_BITS, compute_in_eight_bits
from qflux.ragged.compilation import compile_blocks
from qflux.training.optimizer.step import settle_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = FULL if DEVICE == "cuda" else SMALL
EDITS = {"flux": (4096,) * 2, "qwen": (4096,) * 2, "klein": (1024,) * 6}
"""Target tokens of what is trained in `limited`: two edits of 1024 x 1024 pixels, or six of 512 x 512: 16k tokens."""
LIMITS = {"flux": (24, 16, 12, 8), "qwen": (24, 16, 12), "klein": (16, 8)}
HEAD = "| step | passes | recomputed | in host memory | s/step | peak GiB | predicted GiB | predicted / measured | |"


@dataclass
class Bench:
    """A model of one scale, and what is predicted of it."""

    name: str
    size: Scale | None = None
    """Another than this device is fit for: nothing of it will run."""
    precision: str | None = None
    """In what frozen layers of blocks compute, if not in the model's own dtype."""

    def __post_init__(self) -> None:
        self.scale: Scale = self.size or SCALES[self.name]
        self.family = get_family(self.scale.family)
        folder = Path(tempfile.mkdtemp())
        with torch.device("meta"):
            self.family.transformer(**self.scale.shape).save_config(folder / "transformer")
        settings = {
            "family": self.scale.family,
            "model": {
                "pretrained": str(folder),
                "dtype": str(self.scale.dtype).removeprefix("torch."),
                "precision": self.precision,
            },
            "data": {"path": str(folder)},
            "lora": {"rank": 16},
            "cache": {"project_text": False},
        }
        self.config: Config = load_config(settings)
        with torch.device("meta"):
            transformer = empty_transformer(self.family.transformer, self.config.model)
        self.arithmetic: Arithmetic = self.family.arithmetic(transformer)
        self.footprint = Footprint.of(self.config, self.family, transformer, max(self.scale.text_lengths))
        self.compiled = DEVICE == "cuda"
        self.model: Any = None

    def card(self, memory: int | None) -> Card:
        found = Card.of(torch.device(DEVICE), memory)
        if found is None:
            return Card("no card", 2**34, 1e12)
        # A model that is there already is part of the plan.
        held = torch.cuda.memory_allocated() if DEVICE == "cuda" and memory is None else 0
        return replace(found, memory=found.memory + held)

    def batch(self, targets: Sequence[int], start: int = 0) -> Batch:
        """Some of the samples of a step, the first of which is number `start`."""
        texts = (self.scale.text_lengths * 16)[start : start + len(targets)]
        return Batch(list(targets), list(texts))

    def build(self) -> None:
        """A fresh model on the device, all of it."""
        self.model = None
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        self.model = build_model(self.scale, DEVICE)
        settle_gradients(self.model.parameters())  # as in training
        blocks = self.family.blocks(self.model)
        if self.precision:
            compute_in_eight_bits(blocks, self.precision)
        if self.compiled:
            compile_blocks(blocks)

    def run(self, step: Batch, choice: Choice, passes: int | None = None) -> tuple[float, float, int]:
        """Seconds of a step, its peak in GiB, and what was predicted in bytes, in so many passes or the choice's."""
        count = passes or len(in_order(step.lengths, choice.most_tokens or sum(step.lengths)))
        batches, start = [], 0
        for size in evenly(step.lengths, count):
            batches.append(self.batch(step.targets[start : start + size], start))
            start += size
        blocks = self.family.blocks(self.model)
        again = {id(blocks[place]) for place in choice.recomputed(len(blocks))}
        recompute(self.model, again, choice.keeps_attention, choice.hosts_inputs)
        seconds, peak = measure(self._step(batches, choice), replace(self.scale, repeats=2), DEVICE, warmup=2)
        largest = max(sum(batch.lengths) for batch in batches)
        return seconds, peak, self.footprint.peak(largest, choice)

    def _step(self, batches: Sequence[Batch], choice: Choice) -> Any:
        inputs = [inputs_of(self.model, self.scale, batch, DEVICE) for batch in batches]
        # As in training: one sample alone runs diffusers' own forward, unless attention is kept.
        ragged = [choice.keeps_attention or len(each.shapes) > 1 for each in inputs]
        inputs = [replace(each, ragged=flag) for each, flag in zip(inputs, ragged, strict=True)]
        goals = [torch.randn_like(each.images) for each in inputs]
        optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4, fused=True)

        def step() -> None:
            for each, goal in zip(inputs, goals, strict=True):
                (self.family.velocity(self.model, each) - goal).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def row(self, name: str, step: Batch, choice: Choice, passes: int | None = None, mark: str = "") -> float | None:
        """One line of a table; seconds, or none if it did not fit."""
        blocks = self.footprint.blocks
        kept = " but for attention" if choice.keeps_attention else ""
        largest = predict(choice, self.footprint, self.arithmetic, self.card(None), [[step.lengths]])
        on_host = f"{largest.on_host / GIB:.1f} GiB" if largest.on_host else "–"
        count = passes or len(in_order(step.lengths, choice.most_tokens or sum(step.lengths)))
        cells = [name, str(count), f"{len(choice.recomputed(blocks))} of {blocks}{kept}", on_host]
        try:
            seconds, peak, predicted = self.run(step, choice, passes)
        except torch.OutOfMemoryError:
            self.model.zero_grad()
            cells += ["out of memory", "–", f"{largest.peak / GIB:.1f}", "–", mark]
            seconds = None
        else:
            cells += [f"{seconds:.3f}", f"{peak:.1f}", f"{predicted / GIB:.1f}", f"{predicted / GIB / peak:.3f}", mark]
        print("|", " | ".join(cells), "|", flush=True)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        return seconds


def head(title: str) -> None:
    print(f"\n{title}\n\n{HEAD}\n" + "|---" * 9 + "|", flush=True)


def grid(names: Sequence[str]) -> None:
    """Passes and recomputation, on the whole card."""
    for name in names:
        bench = Bench(name)
        bench.build()
        head(bench.scale.name)
        every, compiled = bench.footprint.blocks, bench.compiled
        none, all_, kept = (Choice(None, first, 1, compiled) for first in (0, every, every))
        kept = replace(kept, keeps_attention=True)
        for samples in ("four, 45 %", "sixteen small"):
            step = bench.batch([n // bench.scale.divide for n in BATCHES[samples]])
            count = len(step.targets)
            chosen, _ = choose(
                bench.config, bench.footprint, bench.arithmetic, bench.card(None), [[step.lengths]], compiled=compiled
            )
            bench.row(samples, step, chosen, mark="**chosen**")
            for passes in (1, 2, 3, 4):
                bench.row(samples, step, none, passes)
            bench.row(samples, step, kept, 1)
            bench.row(samples, step, all_, 1)
            bench.row(samples, step, none, count, "one by one")


def limited(names: Sequence[str], limits: Sequence[int] | None, precision: str | None) -> None:
    """Less and less memory."""
    for name in names:
        bench = Bench(name, precision=precision)
        targets = [n // bench.scale.divide for n in EDITS[name]]
        step = Batch(targets, [bench.scale.text_lengths[-1]] * len(targets))
        head(
            f"{bench.scale.name}, {len(targets)} edits of {step.lengths[0]:,} tokens, {precision or bench.scale.dtype}"
        )
        unlimited = 0.0
        for limit in (None, *(limits or LIMITS[name])):
            memory = None if limit is None else limit * GIB
            bench.build()
            start = time.perf_counter()
            card = bench.card(None) if memory is None else replace(bench.card(None), memory=memory)
            choice, _ = choose(
                bench.config, bench.footprint, bench.arithmetic, card, [[step.lengths]], compiled=bench.compiled
            )
            blocks = bench.family.blocks(bench.model)
            waiting = [blocks[place] for place in choice.waiting(len(blocks))]
            if waiting:
                StreamedBlocks(waiting, torch.device(DEVICE))
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
            limit_memory(torch.device(DEVICE), memory)
            moved = time.perf_counter() - start
            seconds = bench.row(f"{limit or 'no'} GiB", step, choice, mark=f"(to the host: {moved:.0f} s)")
            limit_memory(torch.device(DEVICE), 10**15)
            if limit is None:
                unlimited = seconds or 0.0
            elif seconds:
                print(f"  {limit} GiB: {unlimited / seconds:.0%} of the unlimited speed; {choice}", flush=True)


def others(names: Sequence[str], limit: int) -> None:
    """What `qflux cache` and `qflux predict` do, within a limit: a prompt, an image there and back, an edit."""
    print("\n| model | weights GiB | host GiB | prompt s | encode s | decode s | a step of an edit s | peak GiB |")
    print("|---" * 8 + "|", flush=True)
    for name in names:
        limit_memory(torch.device(DEVICE), limit * GIB)
        other(Bench(name), limit)
        limit_memory(torch.device(DEVICE), 10**15)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def other(bench: Bench, limit: int) -> None:
    family, device = bench.family, torch.device(DEVICE)
    components: Any = full_components(bench.name, bench.scale, DEVICE == "cuda")
    models = [components.transformer, *components.text_models]
    whole = sum(map(model_bytes, (*models, components.vae)))
    components.vae.to(device)
    place(models, device, limit * GIB - model_bytes(components.vae) - 4 * GIB)
    on_device = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    encoder = encoder_of(family, components, TextLimit(512, truncate=True))
    side = 1024 // bench.scale.divide
    pixels, tokens = torch.zeros(3, side, side), side // family.pixels_per_token
    prompt = Prompt("turn the day into night", images=components.seen(side))
    inputs = inputs_of(components.transformer, bench.scale, bench.batch([tokens**2]), DEVICE)
    works: list[Any] = [
        lambda: encoder.encode_text([prompt]),
        lambda: encoder.encode_images([pixels]),
        lambda: encoder.decode_image(inputs.images[: tokens**2], (1, tokens, tokens)),
        lambda: family.velocity(components.transformer, inputs),
    ]
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        times = [measure(work, replace(bench.scale, repeats=1), DEVICE, 1) for work in works]
    sizes = (f"{whole / GIB:.1f}", f"{(whole - on_device) / GIB:.1f}")
    found = (*(f"{seconds:.2f}" for seconds, _ in times), f"{max(peak for _, peak in times):.1f}")
    print("|", " | ".join((bench.scale.name, *sizes, *found)), "|", flush=True)


def plans() -> None:
    """Four edits of 1024 x 1024 pixels a step, on cards that are not here."""
    names, sizes = ("flux3", "qwen21", "klein", "flux", "qwen"), (12, 16, 24, 32, 48, 80, 141)
    cards = [found for size in sizes if (found := Card.of(torch.device("cpu"), size * 10**9))]
    print(
        "| |",
        " | ".join(f"{size} GB, {card.name.split('like ')[1]}" for size, card in zip(sizes, cards, strict=True)),
        "|",
    )
    print("|---" * (1 + len(sizes)) + "|")
    for name in names:
        bench = Bench(name, FULL[name])
        cells, step = [], Batch([4096] * 4, [512] * 4).lengths
        for card in cards:
            choice, plan = choose(
                bench.config, bench.footprint, bench.arithmetic, card, [[step]], compiled=True, longest=max(step)
            )
            parts = [f"{len(choice.recomputed(plan.blocks))} of {plan.blocks}"]
            parts += [f"{choice.streamed} streamed"] if choice.streamed else []
            parts += [f"{plan.passes:.0f} pass{'es' if plan.passes > 1 else ''}", f"{plan.seconds:.1f} s"]
            parts += [f"{plan.on_host / GIB:.0f} GiB of host memory"] if plan.on_host else []
            cells.append(", ".join(parts))
        print(f"| {bench.scale.name} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["grid", "limited", "others", "plans"])
    parser.add_argument("--models", nargs="*", choices=sorted(EDITS), default=["flux"])
    parser.add_argument("--limits", nargs="*", type=int, help="GiB")
    parser.add_argument("--precision", choices=sorted(EIGHT_BITS), help="of `limited`")
    arguments = parser.parse_args()
    limit_memory(torch.device(DEVICE), None)  # as training does
    if arguments.what == "grid":
        grid(arguments.models)
    elif arguments.what == "limited":
        limited(arguments.models, arguments.limits, arguments.precision)
    elif arguments.what == "plans":
        plans()
    else:
        others(arguments.models, (arguments.limits or [12])[0])


if __name__ == "__main__":
    main()
