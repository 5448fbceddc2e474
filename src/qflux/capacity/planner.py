"""What is chosen so that a run fits a card and is fast. A setting that somebody has made is taken as it is."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from shutil import which

import torch

from qflux.capacity.card import Card
from qflux.capacity.choice import Choice
from qflux.capacity.footprint import Footprint
from qflux.capacity.shortage import IN_FEWER_BITS
from qflux.config import Config
from qflux.data.cut import in_order
from qflux.errors import ConfigError
from qflux.memory.placing import GIB
from qflux.models.family import Arithmetic

_USED = 0.96
"""Of a card's memory: what is freed in pieces can't all be used again."""
_SPEED = {True: 0.47, False: 0.42}
"""How much of a card's arithmetic compiled and eager blocks reach."""
_HOST_USED = 0.7
"""Of host memory that is free: reading data takes some, and torch's pinned memory comes in powers of two."""
_LINK_USED = 0.7
"""Of what a link can carry: a block's weights come while the one before it runs, and large blocks of little arithmetic
wait. On one H200, a step of FLUX.1 in two passes that is bound by its link takes 2.33 s, and 2.38 by this."""
_HOST_SECONDS = 0.0015
"""The host takes so long for a block forward, and twice that backward: a pass of few tokens takes no less."""

_ABOUT_THE_SAME = 1.01
"""A way that is faster by less than this is not worth moving more for."""
_SHARES = 16
"""Into so many shares blocks are divided: only such numbers are streamed, unless all blocks may be."""

Step = Sequence[Sequence[int]]
"""The tokens of the samples of each micro-batch of an optimizer step."""


@dataclass(frozen=True)
class Prediction:
    """What a choice takes, before anything has run. Bytes, and seconds of an optimizer step."""

    card: str
    memory: int
    weights: int
    """On the card."""
    on_host: int
    """Weights, and inputs of blocks, that are copied from host memory in every pass."""
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
        again = len(choice.recomputed(self.blocks))
        recomputed = f"{again} of {self.blocks} blocks recomputed"
        recomputed += " but for attention" if again and choice.keeps_attention else ""
        waiting = [f"the weights of {len(choice.waiting(self.blocks))}"] if choice.streamed else []
        kept = " and what their attention gave" if choice.keeps_attention else ""
        waiting += [f"the inputs of {again}{kept}"] if choice.hosts_inputs else []
        on_host = f", {' and '.join(waiting)} in host memory ({_gib(self.on_host)} GiB)" if waiting else ""
        return (
            f"passes of {tokens}, {recomputed}{on_host}{', compiled' if choice.compiled else ''}\n"
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
        keeps_attention=settings.keep_attention is True,
        hosts_inputs=settings.offload_inputs is True,
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
    work = [_Work.of(step, arithmetic) for step in steps]
    ways = _on_this_host(ways, footprint, card, work, longest)
    if config.train.tokens_per_pass == "auto":
        fitting = [way for way in ways if (way.most_tokens or 0) >= longest]
        if not fitting:
            raise _too_small(config, footprint, card, longest, ways)
    else:
        peaks = [footprint.peak(_largest(work, way, longest), way) for way in ways]
        fitting = [way for way, peak in zip(ways, peaks, strict=True) if peak <= _USED * card.memory]
        fitting = fitting or [ways[peaks.index(min(peaks))]]
    # Of ways that take about the same time, the first: it moves least.
    seconds = [_seconds(way, footprint, card, work) for way in fitting]
    best = min(seconds) * _ABOUT_THE_SAME
    choice = next(way for way, time in zip(fitting, seconds, strict=True) if time <= best)
    return choice, predict(choice, footprint, arithmetic, card, steps, longest)


def predict(
    choice: Choice,
    footprint: Footprint,
    arithmetic: Arithmetic,
    card: Card,
    steps: Sequence[Step],
    longest: int = 0,
) -> Prediction:
    """What a choice takes of a card, and how long its steps are."""
    work = [_Work.of(step, arithmetic) for step in steps]
    largest = _largest(work, choice, longest)
    return Prediction(
        card=card.name,
        memory=card.memory,
        weights=footprint.weights(choice),
        on_host=_on_host(choice, footprint, _largest(work, choice, longest)),
        trained=footprint.trained,
        activations=int(footprint.activations(choice)(largest)),
        seconds=_seconds(choice, footprint, card, work),
        passes=sum(each.passes(choice.most_tokens) for each in work) / len(work),
        blocks=footprint.blocks,
    )


@dataclass(frozen=True)
class _Work:
    """An optimizer step of one process."""

    batches: tuple[tuple[int, ...], ...]
    """The tokens of the samples of its micro-batches."""
    lengths: tuple[int, ...]
    """The same, of the whole step."""
    linear: float
    """FLOP of its forward passes in linear layers."""
    attention: float

    @classmethod
    def of(cls, step: Step, arithmetic: Arithmetic) -> _Work:
        batches = tuple(tuple(batch) for batch in step if batch)
        lengths = tuple(length for batch in batches for length in batch)
        pairs = sum(length**2 for length in lengths)
        return cls(batches, lengths, arithmetic.per_token * sum(lengths), arithmetic.per_pair * pairs)

    def passes(self, most: int | None) -> int:
        """So many, of at most so many tokens each."""
        return len(self.batches) if most is None else len(in_order(self.lengths, most))

    def largest(self, most: int | None) -> int:
        """Tokens of its largest pass, or a few more."""
        whole = max(map(sum, self.batches)) if most is None else sum(self.lengths)
        return whole if most is None else min(whole, max(most, *self.lengths))


def _largest(work: Sequence[_Work], choice: Choice, longest: int) -> int:
    return max(longest, *(each.largest(choice.most_tokens) for each in work))


def _on_host(choice: Choice, footprint: Footprint, largest: int) -> int:
    """Bytes that wait in host memory, if the largest pass has so many tokens."""
    return footprint.weights_on_host(choice) + int(footprint.inputs_on_host(choice)(largest))


def _on_this_host(
    ways: Sequence[Choice], footprint: Footprint, card: Card, work: Sequence[_Work], longest: int
) -> list[Choice]:
    """Those that its memory is enough for; an error if somebody has asked for more."""
    if card.host is None:
        return list(ways)
    needed = [_on_host(way, footprint, _largest(work, way, longest)) for way in ways]
    found = [way for way, bytes_ in zip(ways, needed, strict=True) if bytes_ <= _HOST_USED * card.host]
    if not found:
        raise ConfigError(
            f"{_gib(min(needed))} GiB of weights and inputs would have to wait in host memory, and {_gib(card.host)} "
            "GiB of that are free for each process",
            "lower train.streamed_blocks, set train.offload_inputs: false, or free some memory.",
        )
    return found


def _seconds(choice: Choice, footprint: Footprint, card: Card, work: Sequence[_Work]) -> float:
    """Of a step, on average.

    Forward and backward, whatever takes longest: arithmetic; the host, which queues it; or what is on its way from host
    memory, weights forward and backward and inputs backward. Inputs leave on the other way of the link.
    """
    share, speed = len(choice.recomputed(footprint.blocks)) / footprint.blocks, card.flops * _SPEED[choice.compiled]
    of_host = footprint.blocks * _HOST_SECONDS
    link = _LINK_USED * card.link
    weights, inputs = footprint.weights_on_host(choice) / link, footprint.inputs_on_host(choice).per_token / link
    total = 0.0
    for each in work:
        passes = each.passes(choice.most_tokens)
        # Frozen weights have no gradient: backward their products are as many as forward; attention's are twice.
        linear = each.linear / footprint.speed
        again = share * ((1 - footprint.unread) * linear + (0 if choice.keeps_attention else each.attention))
        forward, backward = linear + each.attention, linear + 2 * each.attention + again
        leaving = inputs * sum(each.lengths)
        total += max(forward / speed, passes * of_host, passes * weights, leaving)
        total += footprint.looks * max(forward / speed, passes * of_host, passes * weights)
        total += max(backward / speed, passes * of_host * (2 + share), passes * weights + leaving)
    return total / len(work)


def _ways(config: Config, blocks: int, compiled: bool) -> list[Choice]:
    """All that could be done about blocks, what moves least first: what somebody has said is taken as it is."""
    asked = config.train.gradient_checkpointing
    if asked == "auto":
        recomputed = [(count, 1) for count in range(blocks + 1)]
    else:
        recomputed = [(blocks, int(asked)) if asked else (0, 1)]
    ways = [
        Choice(None, first, every, compiled, streamed, keeps, hosts)
        for first, every in recomputed
        for streamed in _streamed(config, first if every == 1 else 0, blocks)
        for keeps in _flags(config.train.keep_attention, first)
        for hosts in _flags(config.train.offload_inputs, first)
    ]
    return sorted(ways, key=lambda way: (way.hosts_inputs, way.streamed))


def _streamed(config: Config, may: int, blocks: int) -> list[int]:
    """How many blocks could be streamed, if the first so many may; of many numbers some are looked at."""
    asked = config.train.streamed_blocks
    if asked != "auto":
        return [min(asked, blocks)] if min(asked, blocks) <= may else []
    # Where all are recomputed, memory is scarcest, and each block that stays is one that need not be waited for.
    shares = set(range(blocks + 1)) if may == blocks else {share * blocks // _SHARES for share in range(_SHARES + 1)}
    return sorted(share for share in shares if share <= may) if may in shares and can_stream(config) else [0]


def _flags(asked: bool | str, recomputed: int) -> list[bool]:
    if not recomputed:
        return [False]
    return [False, True] if isinstance(asked, str) else [asked]


def can_stream(config: Config) -> bool:
    """Whether frozen weights may wait in host memory.

    What trains has to stay, FSDP moves its own shards, and bitsandbytes keeps its scales apart from its weights.
    """
    kept = config.model.quantization != "nf4" and config.train.distributed == "ddp"
    return config.train.method == "lora" and kept


def _with_most_tokens(config: Config, footprint: Footprint, card: Card, way: Choice) -> Choice:
    """With what a pass may have, by the config or by the memory that is left."""
    asked = config.train.tokens_per_pass
    if asked != "auto":
        return replace(way, most_tokens=asked)
    line = footprint.activations(way)
    room = _USED * card.memory - footprint.weights(way) - footprint.trained - line.fixed
    return replace(way, most_tokens=max(0, int(room / line.per_token)))


def _too_small(config: Config, footprint: Footprint, card: Card, longest: int, ways: Sequence[Choice]) -> ConfigError:
    least = min(footprint.peak(longest, way) for way in ways) / _USED
    remedies = ["choose smaller areas in data.processor"]
    if config.train.streamed_blocks != "auto" and can_stream(config):
        remedies.insert(0, "let weights wait in host memory (train.streamed_blocks: auto)")
    if config.train.gradient_checkpointing not in ("auto", True):
        remedies.insert(0, "set train.gradient_checkpointing: auto")
    if config.model.quantization is None and config.model.precision is None and config.train.method == "lora":
        remedies.append(IN_FEWER_BITS)
    return ConfigError(
        f"{_gib(card.memory)} GiB of {card.name} are too little: the longest sample has {longest:,} tokens, and a pass "
        f"of it alone takes {_gib(least)} GiB",
        ", or ".join(remedies) + f"; the least memory that works is {math.ceil(least / 1e8) / 10} GB.",
    )


def _gib(amount: float) -> str:
    return f"{amount / GIB:.1f}"
