"""Reading cached samples through the loader, against plain safetensors reads of the same files.

    python benchmarks/loader.py

Samples are edits of 1024 x 1024 pixels with one control, in bfloat16: prompts of 512 x 4096, two latents of 4096 x 64.
Both read from the file cache of the system, so that the disk's speed does not hide what the code costs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.keys import SampleKeys
from qflux.data.encoded import COMPLETE
from qflux.data.reader import read_ahead
from qflux.files.hashing import key_of
from qflux.ragged.shapes import Shapes

SAMPLES, REPEATS = 300, 5


def fill(store: EmbeddingCacheManager) -> list[SampleKeys]:
    samples = []
    for number in range(SAMPLES):
        text, target, control = (key_of(kind, number) for kind in ("text", "target", "control"))
        shapes = Shapes(((1, 64, 64),), ((1, 64, 64),))
        keys = SampleKeys(key_of(number), ((COMPLETE, text),), target, (control,), shapes, None)
        store.write("text", text, {"tokens": torch.randn(512, 4096).bfloat16(), "pooled": torch.randn(768).bfloat16()})
        for key in keys.images:
            store.write("image", key, {"latents": torch.randn(4096, 64).bfloat16()})
        samples.append(keys)
    return samples


def timed(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddingCacheManager(Path(folder))
        samples = fill(store)
        files = [store.entry_path(kind, key) for keys in samples for kind, key in keys.entries]
        size = sum(file.stat().st_size for file in files)

        def plain() -> None:
            for file in files:  # the library only maps the file: a copy brings it into memory, as the loader does
                for tensor in load_file(file).values():
                    tensor.clone()

        def through_loader(workers: int) -> None:
            for _ in read_ahead(store.load, samples, workers):
                pass

        rows = [("plain safetensors reads", timed(plain))]
        rows += [
            (f"loader, {workers} workers, every entry checked", timed(lambda workers=workers: through_loader(workers)))  # type: ignore[misc]
            for workers in (0, 1, 2, 4)
        ]
    print(f"{SAMPLES} samples, {len(files)} files, {size / 1e9:.2f} GB, median of {REPEATS}\n")
    print("| | GB/s | of plain reads |\n|---|---|---|")
    for name, seconds in rows:
        print(f"| {name} | {size / seconds / 1e9:.2f} | {rows[0][1] / seconds:.0%} |")


if __name__ == "__main__":
    main()
