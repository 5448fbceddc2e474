"""What is chosen so that a run fits a card and is fast: tokens of a pass, blocks to recompute, compilation.

None of it changes the result. A setting that somebody has made is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch

from qflux.capacity.card import GIB, Card
from qflux.capacity.footprint import Footprint
from qflux.config import Config
from qflux.data.cut import evenly, in_order
from qflux.errors import ConfigError
from qflux.models.family import Arithmetic

_USED = 0.96
"""Of a card's memory: what is freed in pieces can't all be used again."""
_SPEED = {True: 0.47, False: 0.42}
"""How much of a card's arithmetic compiled and eager blocks reach."""
_HOST_SECONDS = 0.0015
"""The host takes so long for a block forward, and twice that backward: a pass of few tokens takes no less."""


@dataclass(frozen=True)
class Choice:
    """How a run goes about its steps."""

    most_tokens: int | None
    """Tokens of a pass at most; none: passes are the micro-batches that the data settings ask for."""
    first: int | None
    """The first so many blocks may compute their activations again in the backward pass; none: all of them may."""
    every: int
    """Of those, each (1), every second (2) and so on does."""
    compiled: bool

    def recomputed(self, blocks: int) -> range:
        """Which of so many blocks compute their activations again."""
        return range(blocks)[: self.first][:: self.every]

    def dump(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


@dataclass(frozen=True)
class Prediction:
    """What a choice takes, before anything has run. Bytes, and seconds of an optimizer step."""

    card: str
    memory: int
    weights: int
    trained: int
    activations: int
    seconds: float
    passes: float
    """Of a step, on average."""
    blocks: int

    @property
    def peak(self) -> int:
        return self.weights + self.trained + self.activations

    def described(self, choice: Choice) -> str:
        """In two lines."""
        tokens = f"at most {choice.most_tokens:,} tokens" if choice.most_tokens else "the micro-batches of the data"
        parts = f"weights {_gib(self.weights)}, what trains {_gib(self.trained)}, activations {_gib(self.activations)}"
        return (
            f"passes of {tokens}, {len(choice.recomputed(self.blocks))} of {self.blocks} blocks recomputed"
            f"{', compiled' if choice.compiled else ''}\n"
            f"{parts}: {_gib(self.peak)} of {_gib(self.memory)} GiB; {self.passes:.1f} passes and about "
            f"{self.seconds:.2g} s a step ({self.card})"
        )


def without_a_card(config: Config) -> Choice:
    """On a CPU, unless somebody says otherwise: every block recomputed, and micro-batches as the data settings say."""
    asked, tokens = config.train.gradient_checkpointing, config.train.tokens_per_pass
    first, every = (None, 1) if asked == "auto" else _recomputations(config, 0)[0]
    return Choice(None if tokens == "auto" else tokens, first, every, compiles(config, torch.device("cpu")))


def compiles(config: Config, device: torch.device) -> bool:
    """Whether blocks are compiled."""
    if config.train.compile != "auto":
        return config.train.compile
    # torchao's 8-bit weights take minutes to compile; and without Triton there is nothing to compile to.
    return device.type == "cuda" and config.model.quantization is None and find_spec("triton") is not None


def choose(
    config: Config,
    footprint: Footprint,
    arithmetic: Arithmetic,
    card: Card,
    steps: Sequence[Sequence[int]],
    compiled: bool,
) -> tuple[Choice, Prediction]:
    """The fastest way that fits; `steps` are the tokens of the samples of some optimizer steps of one process.

    If nothing fits, an error says how much memory would do.
    """
    longest = max(max(step) for step in steps)
    ways = [
        Choice(most, first, every, compiled)
        for first, every in _recomputations(config, footprint.blocks)
        if (most := _most_tokens(config, footprint, card, (first, every), compiled)) is None or most >= longest
    ]
    if not ways:
        raise _too_small(config, footprint, card, longest, compiled)
    predicted = [(choice, predict(choice, footprint, arithmetic, card, steps)) for choice in ways]
    return min(predicted, key=lambda way: way[1].seconds)


def predict(
    choice: Choice, footprint: Footprint, arithmetic: Arithmetic, card: Card, steps: Sequence[Sequence[int]]
) -> Prediction:
    """What a choice takes of a card, and how long its steps are."""
    passes = [_passes(step, choice.most_tokens) for step in steps]
    again = len(choice.recomputed(footprint.blocks))
    share = again / footprint.blocks
    speed = card.flops * _SPEED[choice.compiled]
    seconds = 0.0
    for lengths in (lengths for step in passes for lengths in step):
        tokens, pairs = sum(lengths), sum(length**2 for length in lengths)
        forward = arithmetic.per_token * tokens + arithmetic.per_pair * pairs
        # Frozen weights have no gradient: backward their products are as many as forward; attention's are twice.
        backward = arithmetic.per_token * tokens + 2 * arithmetic.per_pair * pairs
        host = footprint.blocks * (3 + share) * _HOST_SECONDS
        seconds += max((forward * (1 + share) + backward) / speed, host)
    largest = max(sum(lengths) for step in passes for lengths in step)
    return Prediction(
        card=card.name,
        memory=card.memory,
        weights=footprint.weights,
        trained=footprint.trained,
        activations=int(footprint.activations(again, choice.compiled)(largest)),
        seconds=seconds / len(steps),
        passes=sum(map(len, passes)) / len(steps),
        blocks=footprint.blocks,
    )


def _passes(lengths: Sequence[int], most: int | None) -> list[list[int]]:
    if most is None:
        return [[length] for length in lengths]
    counts, found, start = evenly(lengths, len(in_order(lengths, most)), most), [], 0
    for count in counts:
        found.append(list(lengths[start : start + count]))
        start += count
    return found


def _recomputations(config: Config, blocks: int) -> list[tuple[int | None, int]]:
    """Which blocks may be recomputed, the fewest first: the first so many of them, or what somebody has said."""
    asked = config.train.gradient_checkpointing
    if asked == "auto":
        return [(count, 1) for count in range(blocks + 1)]
    return [(None, int(asked))] if asked else [(0, 1)]


def _most_tokens(
    config: Config, footprint: Footprint, card: Card, recomputed: tuple[int | None, int], compiled: bool
) -> int | None:
    """What a pass may have, by the config or by the memory that is left."""
    asked = config.train.tokens_per_pass
    if asked != "auto":
        return asked
    again = Choice(None, *recomputed, compiled).recomputed(footprint.blocks)
    line = footprint.activations(len(again), compiled)
    room = _USED * card.memory - footprint.weights - footprint.trained - line.fixed
    return max(0, int(room / line.per_token))


def _too_small(config: Config, footprint: Footprint, card: Card, longest: int, compiled: bool) -> ConfigError:
    most = len(Choice(None, *_recomputations(config, footprint.blocks)[-1], compiled).recomputed(footprint.blocks))
    least = footprint.peak(longest, most, compiled) / _USED
    ways = ["choose smaller areas in data.processor"]
    if config.train.gradient_checkpointing != "auto" and most < footprint.blocks:
        ways.insert(0, "set train.gradient_checkpointing: auto")
    if config.model.quantization is None and config.train.method == "lora":
        ways.append("quantize the base (model.quantization: fp8, int8 or nf4)")
    return ConfigError(
        f"{_gib(card.memory)} GiB of {card.name} are too little: the longest sample has {longest:,} tokens, and a pass "
        f"of it alone takes {_gib(least)} GiB, {_gib(footprint.weights)} of them for weights",
        ", or ".join(ways) + f"; the least memory that works is {math.ceil(least / 1e8) / 10} GB.",
    )


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f}"
