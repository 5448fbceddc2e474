"""What the trainer's own loop costs over a bare training step: loader, logging, optimizer, checks and all.

    python benchmarks/trainer_loop.py            # CUDA: FLUX 12B; CPU: scaled down
    python benchmarks/trainer_loop.py --no-compile

The trainer fits a LoRA on four stored samples of 2 n image tokens (n = 1024, 1600, 2304, 4096), so that every step is
the same batch. The bare step is forward, backward, optimizer on that batch, already on the device. Some steps of the
trainer are profiled: calls that make the host wait for the device are listed. They are not in the timing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from mixed_batch import BATCHES, FULL, SMALL, Batch, Scale, build_transformer, median_seconds, training_step
from torch import nn
from torch.profiler import ProfilerActivity, profile

from qflux.commands import Trainer
from qflux.config import Config, load_config
from qflux.runs.metrics import StepReport
from qflux.training.distributed import World

WARM_UP, MEASURED, PROFILED = 4, 12, 4


def write_samples(folder: Path, scale: Scale, batch: Batch) -> None:
    """Samples as torch files of format 2.0."""
    torch.manual_seed(0)
    for index, (shapes, text) in enumerate(zip(batch.shapes, batch.text_lengths, strict=True)):
        counts = [rows * columns for _, rows, columns in shapes.images]
        torch.save(
            {
                "version": "2.0",
                "prompt_embeds": torch.randn(text, scale.text_width, dtype=scale.dtype),
                "pooled_prompt_embeds": torch.randn(768, dtype=scale.dtype),
                "image_latents": torch.randn(counts[0], 64, dtype=scale.dtype),
                "control_latents": torch.randn(counts[1], 64, dtype=scale.dtype),
                "img_shapes": shapes.images,
            },
            folder / f"sample_{index}.pt",
        )


class BenchmarkTrainer(Trainer):
    """A trainer whose transformer is made, not loaded."""

    def __init__(self, config: Config, transformer: nn.Module) -> None:
        super().__init__(config)
        self._made = transformer

    def _transformer(self, world: World) -> nn.Module:
        return self._made


class Watch:
    """Listens to the trainer: profiles a few steps, and collects what torch says about waiting meanwhile."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])])
        self._caught: list[warnings.WarningMessage] = []
        self.reports: list[StepReport] = []

    def __call__(self, report: StepReport) -> None:
        self.reports.append(report)
        if report.step == WARM_UP + MEASURED:
            if self._cuda:
                torch.cuda.set_sync_debug_mode("warn")
            self._record = warnings.catch_warnings(record=True)
            self._caught = self._record.__enter__() or []
            warnings.simplefilter("always")
            self._profile.start()
        if report.step == WARM_UP + MEASURED + PROFILED:
            self._profile.stop()
            self._record.__exit__(None, None, None)
            if self._cuda:
                torch.cuda.set_sync_debug_mode("default")

    def waits(self) -> Counter[str]:
        """Calls that make the host wait, during the profiled steps."""
        # A value read from the device shows as a stream synchronisation; the profiler ends with one of its own.
        names = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
        calls: Counter[str] = Counter({"cudaDeviceSynchronize": -1} if self._cuda else {})
        for event in self._profile.key_averages():
            if event.key in names:
                calls[event.key] += event.count
        calls.update(str(w.message).splitlines()[0] for w in self._caught if "synchroniz" in str(w.message))
        return +calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["flux", "qwen"], default="flux")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = (FULL if device == "cuda" else SMALL)[arguments.model]
    batch = Batch([n // scale.divide for n in BATCHES["45 %"]], [n // scale.divide for n in scale.text_lengths])
    compiled = device == "cuda" and not arguments.no_compile
    transformer = build_transformer(scale, device)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "samples").mkdir()
        (folder / "model" / "transformer").mkdir(parents=True)
        transformer.save_config(folder / "model" / "transformer")
        write_samples(folder / "samples", scale, batch)
        config = load_config(
            {
                "family": scale.family,
                "output_dir": str(folder / "runs"),
                "model": {
                    "pretrained": str(folder / "model"),
                    "dtype": str(scale.dtype).removeprefix("torch."),
                    "device": device,
                },
                "data": {"sources": [{"type": "cache", "path": str(folder / "samples")}], "batch_size": 4},
                "lora": {"rank": 16},
                "train": {
                    "max_train_steps": WARM_UP + MEASURED + PROFILED + 4,
                    "gradient_checkpointing": True,
                    "compile": compiled,
                    "checkpoint_every": 1000,
                },
            }
        )
        watch = Watch(device)
        started = time.perf_counter()
        result = BenchmarkTrainer(config, transformer).fit(watch)
        whole = time.perf_counter() - started
        lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == result.steps
    measured = lines[WARM_UP : WARM_UP + MEASURED]
    loop = statistics.median(line["seconds"] for line in measured)
    step = training_step(transformer, scale, batch, "packed", device)
    median_seconds(step, WARM_UP, device)
    bare = median_seconds(step, MEASURED, device)

    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{scale.name}, LoRA rank 16, {scale.dtype}, {'compiled' if compiled else 'eager'}, {machine}")
    print(f"torch {torch.__version__}; whole fit {whole:.0f} s; medians of {MEASURED} steps\n")
    print("| | s/step | tokens/s | utilisation | waiting for data | peak GiB |")
    print("|---|---|---|---|---|---|")
    last = measured[-1]
    tokens = last["tokens"]
    utilisation = "-" if last["utilisation"] is None else f"{last['utilisation']:.1%}"
    memory = "-" if last["peak_memory_gib"] is None else f"{last['peak_memory_gib']:.1f}"
    waiting = statistics.median(line["waiting_seconds"] for line in measured)
    print(f"| trainer | {loop:.3f} | {tokens / loop:,.0f} | {utilisation} | {1000 * waiting:.1f} ms | {memory} |")
    print(f"| bare step | {bare:.3f} | {tokens / bare:,.0f} | | | |")
    print(f"\nthe trainer takes {loop / bare - 1:+.1%} of a bare step")
    print(f"calls that wait for the device, in {PROFILED} profiled steps: {dict(watch.waits()) or 'none'}")


if __name__ == "__main__":
    main()
