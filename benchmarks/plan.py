"""Planning a million samples: time, memory, and how evenly 64 ranks are loaded.

    python benchmarks/plan.py

Areas are log-normal from 0.2 to 2 megapixels, aspects 1:3 to 3:1; samples have 0 to 3 controls and 512 text tokens.
"random" deals the shuffled order to the ranks: a micro-batch ends when the next sample would not fit.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from qflux.data.images.sizes import size_for_area
from qflux.data.plan import Batching, EpochPlan, cost_of

SAMPLES, RANKS, MOST_STEPS = 1_000_000, 64, 1000


def realistic_tokens(count: int) -> NDArray[np.int64]:
    """Text and image tokens of each sample; every image has its own size."""
    random = np.random.default_rng(0)
    shapes = random.integers(0, 4096, count)  # 4096 kinds of images are enough, and much faster to size
    areas = np.exp(random.normal(np.log(0.8e6), 0.6, 4096)).clip(0.2e6, 2e6)
    aspects = np.exp(random.uniform(-np.log(3), np.log(3), 4096))
    kinds = np.array([_tokens(area, aspect) for area, aspect in zip(areas, aspects, strict=True)])
    controls = random.integers(0, 4, count)
    further = kinds[random.integers(0, 4096, (count, 2))]
    tokens = kinds[shapes] * np.where(controls > 0, 2, 1)  # the first control has the target's size
    return 512 + tokens + further[:, 0] * (controls > 1) + further[:, 1] * (controls > 2)


def _tokens(area: float, aspect: float) -> int:
    height, width = size_for_area(int(area), round((area * aspect) ** 0.5), round((area / aspect) ** 0.5))
    return height * width // 256


def random_steps(tokens: NDArray[np.int64], budget: int) -> Iterator[list[list[int]]]:
    """Micro-batches of each step, filled in the order of a shuffle."""
    step: list[list[int]] = [[]]
    room = budget
    for sample in np.random.default_rng(1).permutation(len(tokens)).tolist():
        if tokens[sample] > room:
            if len(step) == RANKS:
                yield step
                step = []
            step.append([])
            room = budget
        step[-1].append(sample)
        room -= int(tokens[sample])


def planned_steps(plan: EpochPlan) -> Iterator[list[list[int]]]:
    for within in range(0, len(plan), max(1, len(plan) // MOST_STEPS)):
        yield [[visit.sample for batch in rank for visit in batch] for rank in plan[within].ranks]


def balance(steps: Iterator[list[list[int]]], tokens: NDArray[np.int64]) -> tuple[float, float, float]:
    """How far the slowest rank is above the mean: on average, at the 95th percentile; and tokens per micro-batch."""
    excess, filled = [], []
    costs = cost_of(tokens)
    for _, step in zip(range(MOST_STEPS), steps, strict=False):
        loads = [float(costs[samples].sum()) for samples in step]
        excess.append(max(loads) / (sum(loads) / len(loads)) - 1)
        filled += [int(tokens[samples].sum()) for samples in step]
    return float(np.mean(excess)), float(np.quantile(excess, 0.95)), float(np.mean(filled))


def main() -> None:
    tokens = realistic_tokens(SAMPLES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{SAMPLES:,} samples of {tokens.min()} to {tokens.max()} tokens, mean {tokens.mean():.0f}; {RANKS} ranks\n")
    table = [
        "| batching | plan | steps | built in | slowest rank above mean | 95th percentile | budget used |",
        "|---|---|---|---|---|---|---|",
    ]
    for budget in (32_768, 65_536):
        start = time.perf_counter()
        plan = EpochPlan(tokens, Batching(None, max_tokens=budget, world_size=RANKS))
        seconds = time.perf_counter() - start
        for name, steps in (("qflux", planned_steps(plan)), ("random", random_steps(tokens, budget))):
            mean, tail, filled = balance(steps, tokens)
            built = f"{len(plan):,} | {seconds:.1f} s" if name == "qflux" else "- | -"
            table.append(
                f"| max_tokens {budget} | {name} | {built} | {mean:.1%} | {tail:.1%} | {filled / budget:.1%} |"
            )
    start = time.perf_counter()
    plan = EpochPlan(tokens, Batching(4, world_size=RANKS))
    seconds = time.perf_counter() - start
    mean, tail, _ = balance(planned_steps(plan), tokens)
    table.append(f"| batch_size 4 | qflux | {len(plan):,} | {seconds:.1f} s | {mean:.1%} | {tail:.1%} | - |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("\n".join(table))
    print(f"\npeak memory {peak / 2**20:.2f} GiB, of which {before / 2**20:.2f} GiB before the first plan")


if __name__ == "__main__":
    main()
