"""What is chosen so that a run fits a card and is fast: tokens of a pass, blocks to recompute, compilation.

None of it changes the result. A setting that somebody has made is taken as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from shutil import which
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

Step = Sequence[Sequence[int]]
"""The tokens of the samples of each micro-batch of an optimizer step."""


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
    streamed: int = 0
    """Blocks whose weights stay in host memory and are copied when it is their turn; they are recomputed."""

    def recomputed(self, blocks: int) -> range:
        """Which of so many blocks compute their activations again."""
        return range(blocks)[: self.first][:: self.every]

    def dump(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Choice:
        """From a file; a `ValueError` or `TypeError` if it holds something else."""
        choice = cls(**values)
        numbers = [n for n in (choice.most_tokens, choice.first, choice.every, choice.streamed) if n is not None]
        if not all(type(n) is int and n >= 0 for n in numbers) or not choice.every or type(choice.compiled) is not bool:
            raise ValueError(f"{values} is no choice")
        return choice


@dataclass(frozen=True)
class Prediction:
    """What a choice takes, before anything has run. Bytes, and seconds of an optimizer step."""

    card: str
    memory: int
    weights: int
    """On the card."""
    on_host: int
    """Weights that are copied from host memory in every pass."""
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
        streamed = f", {choice.streamed} streamed ({_gib(self.on_host)} GiB in host memory)" if choice.streamed else ""
        return (
            f"passes of {tokens}, {len(choice.recomputed(self.blocks))} of {self.blocks} blocks recomputed{streamed}"
            f"{', compiled' if choice.compiled else ''}\n"
            f"{parts}: {_gib(self.peak)} of {_gib(self.memory)} GiB; {self.passes:.1f} passes and about "
            f"{self.seconds:.2g} s a step ({self.card})"
        )


def without_a_card(config: Config) -> Choice:
    """On a CPU, unless somebody says otherwise: every block recomputed, and micro-batches as the data settings say."""
    settings, asked = config.train, config.train.gradient_checkpointing
    every = 1 if asked == "auto" else int(asked)
    return Choice(
        most_tokens=None if settings.tokens_per_pass == "auto" else settings.tokens_per_pass,
        first=None if every else 0,
        every=max(1, every),
        compiled=compiles(config, torch.device("cpu")),
        streamed=0 if settings.streamed_blocks == "auto" else settings.streamed_blocks,
    )


def compiles(config: Config, device: torch.device) -> bool:
    """Whether blocks are compiled."""
    if config.train.compile != "auto":
        return config.train.compile
    # torchao's 8-bit weights take minutes to compile; Triton makes the kernels, and a C compiler what starts them.
    compiler = os.environ.get("CC") or next(filter(None, map(which, ("cc", "gcc", "clang"))), None)
    can = find_spec("triton") is not None and compiler is not None
    return device.type == "cuda" and config.model.quantization is None and can


def choose(
    config: Config,
    footprint: Footprint,
    arithmetic: Arithmetic,
    card: Card,
    steps: Sequence[Step],
    *,
    compiled: bool,
    longest: int = 0,
) -> tuple[Choice, Prediction]:
    """The fastest way that fits, for steps like these of one process; `longest` is the largest sample of all.

    If nothing fits, an error says what would. Passes that somebody has asked for are taken as they are, with as little
    memory as can be: how they are cut in the end is tried before the first step.
    """
    longest = max(longest, *(length for step in steps for batch in step for length in batch))
    ways = [_with_most_tokens(config, footprint, card, way) for way in _ways(config, footprint.blocks, compiled)]
    predicted = [(way, predict(way, footprint, arithmetic, card, steps, longest)) for way in ways]
    if config.train.tokens_per_pass == "auto":
        fitting = [found for found in predicted if (found[0].most_tokens or 0) >= longest]
        if not fitting:
            raise _too_small(config, footprint, card, longest, ways)
    else:
        fitting = [found for found in predicted if found[1].peak <= _USED * card.memory]
        fitting = fitting or [min(predicted, key=lambda way: way[1].peak)]
    return min(fitting, key=lambda way: way[1].seconds)


def predict(
    choice: Choice,
    footprint: Footprint,
    arithmetic: Arithmetic,
    card: Card,
    steps: Sequence[Step],
    longest: int = 0,
) -> Prediction:
    """What a choice takes of a card, and how long its steps are."""
    passes = [_passes(step, choice.most_tokens) for step in steps]
    again, on_host = len(choice.recomputed(footprint.blocks)), footprint.on_host(choice.streamed)
    share = again / footprint.blocks
    speed, seconds = card.flops * _SPEED[choice.compiled], 0.0
    # Whatever takes longest: the host, which queues the work, or weights on their way there and back again.
    least = max(footprint.blocks * (3 + share) * _HOST_SECONDS, 2 * on_host / card.link)
    for lengths in (lengths for step in passes for lengths in step):
        tokens, pairs = sum(lengths), sum(length**2 for length in lengths)
        forward = arithmetic.per_token * tokens + arithmetic.per_pair * pairs
        # Frozen weights have no gradient: backward their products are as many as forward; attention's are twice.
        backward = arithmetic.per_token * tokens + 2 * arithmetic.per_pair * pairs
        seconds += max((forward * (1 + share) + backward) / speed, least)
    largest = max(longest, *(sum(lengths) for step in passes for lengths in step))
    return Prediction(
        card=card.name,
        memory=card.memory,
        weights=footprint.weights(choice.streamed),
        on_host=on_host,
        trained=footprint.trained,
        activations=int(footprint.activations(again, choice.compiled)(largest)),
        seconds=seconds / len(steps),
        passes=sum(map(len, passes)) / len(steps),
        blocks=footprint.blocks,
    )


def _passes(step: Step, most: int | None) -> list[list[int]]:
    if most is None:
        return [list(batch) for batch in step if batch]
    lengths = [length for batch in step for length in batch]
    counts, found, start = evenly(lengths, len(in_order(lengths, most)), most), [], 0
    for count in counts:
        found.append(lengths[start : start + count])
        start += count
    return found


def _ways(config: Config, blocks: int, compiled: bool) -> list[Choice]:
    """All that could be done about blocks, the fastest first: what somebody has said is taken as it is."""
    asked, streamed = config.train.gradient_checkpointing, config.train.streamed_blocks
    if streamed == "auto":
        # Weights in fewer bits are no plain tensors, and shards are moved by FSDP itself.
        can_stream = config.model.quantization is None and config.train.method == "lora"
        can_stream = can_stream and config.train.distributed == "ddp" and asked in ("auto", True)
        counts = range(blocks + 1) if can_stream else range(1)
    else:
        counts = range(streamed, streamed + 1)
    streaming = [Choice(None, None, 1, compiled, count) for count in counts if count]
    if 0 not in counts:
        return streaming
    if asked == "auto":
        return [*(Choice(None, count, 1, compiled) for count in range(blocks + 1)), *streaming]
    return [Choice(None, None, int(asked), compiled) if asked else Choice(None, 0, 1, compiled), *streaming]


def _with_most_tokens(config: Config, footprint: Footprint, card: Card, way: Choice) -> Choice:
    """With what a pass may have, by the config or by the memory that is left."""
    asked = config.train.tokens_per_pass
    if asked != "auto":
        return replace(way, most_tokens=asked)
    line = footprint.activations(len(way.recomputed(footprint.blocks)), way.compiled)
    room = _USED * card.memory - footprint.weights(way.streamed) - footprint.trained - line.fixed
    return replace(way, most_tokens=max(0, int(room / line.per_token)))


def _too_small(config: Config, footprint: Footprint, card: Card, longest: int, ways: Sequence[Choice]) -> ConfigError:
    peaks = [footprint.peak(longest, len(way.recomputed(footprint.blocks)), way.compiled, way.streamed) for way in ways]
    least = min(peaks) / _USED
    remedies = ["choose smaller areas in data.processor"]
    if config.train.gradient_checkpointing not in ("auto", True):
        remedies.insert(0, "set train.gradient_checkpointing: auto")
    if config.model.quantization is None and config.train.method == "lora":
        remedies.append("let weights wait in host memory (train.streamed_blocks: auto)")
        remedies.append("quantize the base (model.quantization: fp8, int8 or nf4)")
    return ConfigError(
        f"{_gib(card.memory)} GiB of {card.name} are too little: the longest sample has {longest:,} tokens, and a pass "
        f"of it alone takes {_gib(least)} GiB",
        ", or ".join(remedies) + f"; the least memory that works is {math.ceil(least / 1e8) / 10} GB.",
    )


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f}"
