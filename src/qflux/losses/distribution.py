"""Which noise levels a run will see: a picture of its density, shift and sizes before anything trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from qflux.data.sample import Sample
from qflux.losses.timesteps import NoiseLevels

Curve = list[tuple[float, float]]
"""Noise levels, and how often one is drawn against a draw that prefers none."""
BINS = 50
ALL = "all samples"
_VISIBLE = 0.005
"""Of a noise level: curves that are closer would lie on each other."""
_DRAWS = 2000
"""Of each size, spread evenly: no chance is in the picture."""


def level_curves(levels: NoiseLevels, sizes: Mapping[int, float]) -> dict[str, Curve]:
    """By name the densities of noise levels, for target tokens and how often samples of that many are visited.

    Where the shift goes by the size, of the smallest and the largest; and of all samples, always and last.
    """
    least, most = min(sizes), max(sizes)
    differ = abs(levels.shifted(0.5, least) - levels.shifted(0.5, most)) > _VISIBLE
    ends = {f"the smallest, {least:,} tokens": least, f"the largest, {most:,} tokens": most} if differ else {}
    return {name: _curve(levels, {tokens: 1.0}) for name, tokens in ends.items()} | {ALL: _curve(levels, sizes)}


def visited_sizes(samples: Iterable[Sample]) -> dict[int, float]:
    """Target tokens, and how often samples of that many are visited."""
    visits: dict[int, float] = defaultdict(float)
    for sample in samples:
        visits[sample.shapes.target_tokens] += sample.rate
    return dict(visits)


def _curve(levels: NoiseLevels, sizes: Mapping[int, float]) -> Curve:
    bins, total = [0.0] * BINS, sum(sizes.values())
    for tokens, visits in sizes.items():
        for draw in range(_DRAWS):
            bins[min(BINS - 1, int(levels.level((draw + 0.5) / _DRAWS, tokens) * BINS))] += visits
    return [((place + 0.5) / BINS, count * BINS / (total * _DRAWS)) for place, count in enumerate(bins)]
