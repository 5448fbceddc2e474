"""What a training step of a model takes of memory: weights, what trains, and activations by block kind.

Measured on the model's own code without any weight: two blocks of each kind run forward and backward on the `meta`
device, once keeping their activations and once recomputing them, on few tokens and on more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from qflux.adapters.lora import inject
from qflux.capacity.choice import Choice
from qflux.config import Config
from qflux.data.encoded import TextEmbedding
from qflux.memory.counting import MemoryCount, take_fused_norms
from qflux.memory.hosting import IN_FLIGHT
from qflux.memory.recomputation import recompute
from qflux.memory.streaming import SLOTS
from qflux.models.family import Family, ModelInputs
from qflux.models.precision import SPEED, compute_in_eight_bits, dtype_of, weight_bytes
from qflux.ragged.recomputed.unread import LastLinear
from qflux.ragged.shapes import Shapes

_KEPT = 2
"""Blocks of each kind that are run: what the second one keeps is what each of the others does."""
_OPTIMIZER_BYTES = {"SGD": 0, "Lion": 4, "AdamW8bit": 2, "Adam8bit": 2, "Adafactor": 1, "Prodigy": 16}
"""That an optimizer keeps for each trained weight, where it is not two moments in float32."""


_EIGHT_BITS_AROUND = 1.15
"""So much more compiled blocks need at their peak (added to `compiled_around`) where they compute in 8 bits: rows
of a gradient stand beside it. Measured on klein; FLUX.1 and Qwen agree within 3 %."""


class Line(NamedTuple):
    """Bytes: some whatever happens, and some for each token of a pass."""

    fixed: float = 0.0
    per_token: float = 0.0

    def __call__(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens

    def plus(self, other: Line, times: float = 1.0) -> Line:
        return Line(self.fixed + times * other.fixed, self.per_token + times * other.per_token)

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> Line:
        (tokens, bytes_), (more, most) = first, second
        slope = (most - bytes_) / (more - tokens)
        return cls(bytes_ - slope * tokens, slope)


@dataclass(frozen=True)
class BlockKind:
    """Blocks that are alike; bytes are those of one of them."""

    count: int
    weights: int
    stored: Line
    """If its activations are kept."""
    recomputed: Line
    """If only its inputs are."""
    attention: Line
    """What is kept besides, if attention is not computed again."""


@dataclass(frozen=True)
class Footprint:
    """The memory of a training step, as far as it does not depend on a card."""

    kinds: tuple[BlockKind, ...]
    """In the order in which they run."""
    other_weights: int
    """Bytes of weights outside of blocks, and of the largest that is unpacked from fewer bits for a moment."""
    trained: int
    """Bytes of what trains beside the weights themselves: adapters, gradients, what the optimizer keeps."""
    around_stored: Line
    """Beside what blocks keep, at the peak, if the last block keeps its activations."""
    around_recomputed: Line
    """The same, if it computes them again."""
    compiled: float
    """How much of what blocks keep is left if they are compiled."""
    compiled_around: float
    """How much compiled blocks need beside that, of what others need."""
    looks: int = 0
    """Forward passes besides, without a gradient."""
    unread: float = 0.0
    """How much of the arithmetic of blocks' linear layers is left out when they are computed again."""
    speed: float = 1.0
    """Of linear layers, where they do not compute in `model.dtype`."""

    @property
    def blocks(self) -> int:
        return sum(kind.count for kind in self.kinds)

    def weights(self, choice: Choice) -> int:
        """Bytes of weights on the device; those that wait in host memory take turns in a few slots."""
        sizes, waiting = self._sizes, choice.waiting(self.blocks)
        staying = sum(sizes) - sum(sizes[place] for place in waiting)
        slots = min(SLOTS, len(waiting)) * max((sizes[place] for place in waiting), default=0)
        return self.other_weights + staying + slots

    def weights_on_host(self, choice: Choice) -> int:
        """Bytes of the weights that wait in host memory."""
        return sum(self._sizes[place] for place in choice.waiting(self.blocks))

    def inputs_on_host(self, choice: Choice) -> Line:
        """Of a pass: what blocks that are recomputed leave in host memory, inputs and what attention gave."""
        total, left = Line(), len(choice.recomputed(self.blocks)) if choice.hosts_inputs else 0
        for kind in self.kinds:
            total = total.plus(kind.recomputed, min(left, kind.count))
            total = total.plus(kind.attention, min(left, kind.count) if choice.keeps_attention else 0)
            left -= min(left, kind.count)
        return total

    @property
    def _sizes(self) -> list[int]:
        """Bytes of each block, in the order in which they run."""
        return [kind.weights for kind in self.kinds for _ in range(kind.count)]

    def activations(self, choice: Choice) -> Line:
        """Of a pass, on the device.

        It is the first blocks that are recomputed: when it is their turn in the backward pass, the activations of all
        others are gone.
        """
        of_first, of_others, largest, longest = Line(), Line(), Line(), Line()
        again = len(choice.recomputed(self.blocks))
        left = again
        for kind in self.kinds:
            count = min(left, kind.count)
            left -= count
            left_by_one = kind.recomputed.plus(kind.attention) if choice.keeps_attention else kind.recomputed
            of_first = of_first.plus(left_by_one, count)
            of_others = of_others.plus(kind.stored, kind.count - count)
            if count:
                longest, largest = max(longest, left_by_one, key=_size), max(largest, kind.stored, key=_size)
        if choice.hosts_inputs:
            of_first = min(of_first, Line().plus(longest, IN_FLIGHT), key=_size)
        if choice.compiled:
            around = Line().plus(self.around_stored, self.compiled_around)
            at_end = of_first.plus(of_others, self.compiled).plus(around)
            # Compiled code holds all it has kept until it is through.
            again_at_end = of_first.plus(largest, self.compiled).plus(around)
        else:
            at_end = of_first.plus(of_others).plus(self.around_stored)
            again_at_end = of_first.plus(self.around_recomputed)
        if not again:
            return at_end
        return max(at_end, again_at_end, key=_size) if again < self.blocks else again_at_end

    def sharded(self, processes: int) -> Footprint:
        """Of one of several processes that share the weights: two blocks are gathered while one of them runs."""
        gathered = 2 * max(kind.weights for kind in self.kinds)
        return replace(
            self,
            kinds=tuple(replace(kind, weights=kind.weights // processes) for kind in self.kinds),
            other_weights=self.other_weights + gathered,
            trained=self.trained // processes,
        )

    def peak(self, tokens: int, choice: Choice) -> int:
        """Bytes at the peak of a step whose largest pass has so many tokens."""
        return int(self.weights(choice) + self.trained + self.activations(choice)(tokens))

    @classmethod
    def of(cls, config: Config, family: Family, transformer: Any, text: int = 512) -> Footprint:
        """From a transformer on the `meta` device, which is taken apart; a typical sample has `text` tokens of text."""
        is_full, quantized, dtype = config.train.method == "full", config.model.quantization, config.model.dtype
        precision = config.model.precision
        transformer.to(torch.float32 if is_full else dtype_of(dtype)).requires_grad_(is_full).train()
        kinds = _kinds(transformer, family.blocks(transformer))
        own = [weight_bytes(each[0], quantized or precision) for each in kinds]
        whole = weight_bytes(transformer, quantized)
        if precision:  # of blocks alone
            whole -= sum(len(each) * (weight_bytes(each[0]) - bytes_) for each, bytes_ in zip(kinds, own, strict=True))
        transformer.to(dtype_of(dtype))
        counts = [len(each) for each in kinds]
        _shorten(transformer, kinds)
        take_fused_norms(transformer)
        if not is_full:
            with torch.device("meta"):
                inject(transformer, config.lora, config.lora_targets, config.seed, is_whole=False)
            if precision:
                compute_in_eight_bits(family.blocks(transformer), precision)
        trials = _Trials(config, family, transformer, kinds, text)
        (stored, around_stored), (recomputed, around_recomputed) = trials.lines(False), trials.lines(True)
        attention = [more.plus(less, -1) for more, less in zip(trials.lines(True, True)[0], recomputed, strict=True)]
        if is_full and dtype != "float32":  # autocast keeps a copy of every weight until its gradient is there
            stored = [line.plus(Line(weights / 2)) for line, weights in zip(stored, own, strict=True)]
            around_recomputed = around_recomputed.plus(Line(max(own) / 2))
        return cls(
            kinds=tuple(BlockKind(*each) for each in zip(counts, own, stored, recomputed, attention, strict=True)),
            other_weights=whole - sum(count * weights for count, weights in zip(counts, own, strict=True)),
            trained=_trained(transformer, kinds, counts, config),
            around_stored=around_stored,
            around_recomputed=around_recomputed,
            compiled=family.facts.compiled_activations,
            compiled_around=family.facts.compiled_around + (_EIGHT_BITS_AROUND if precision else 0.0),
            looks=int(config.loss.preserve.blank > 0 or config.loss.preserve.toward == "base"),
            unread=_unread(kinds, counts),
            speed=SPEED[precision] if precision else 1.0,
        )


def _kinds(transformer: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Blocks of one list that are alike: of another list they may see other tokens, and the last one makes fewer."""
    lists = [module for module in transformer.modules() if isinstance(module, nn.ModuleList)]
    home = {id(block): number for number, members in enumerate(lists) for block in members}
    kinds: dict[Any, list[nn.Module]] = {}
    for block in blocks:
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        kinds.setdefault((home[id(block)], type(block), block is blocks[-1], shapes), []).append(block)
    return list(kinds.values())


def _shorten(transformer: nn.Module, kinds: Sequence[list[nn.Module]]) -> None:
    """Take blocks out of a transformer until it has a few of each kind."""
    surplus = {id(block) for kind in kinds for block in kind[_KEPT:]}
    for module in list(transformer.modules()):
        if isinstance(module, nn.ModuleList):
            for place in reversed(range(len(module))):
                if id(module[place]) in surplus:
                    del module[place]


def _trained(transformer: nn.Module, kinds: Sequence[list[nn.Module]], counts: Sequence[int], config: Config) -> int:
    """Bytes that every weight that trains takes: itself, if it is an adapter's; gradient, optimizer, average."""
    in_blocks = [sum(p.numel() for p in kind[0].parameters() if p.requires_grad) for kind in kinds]
    everywhere = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    kept = sum(min(_KEPT, count) * own for count, own in zip(counts, in_blocks, strict=True))
    weights = everywhere - kept + sum(count * own for count, own in zip(counts, in_blocks, strict=True))
    optimizer = _OPTIMIZER_BYTES.get(config.optimizer.class_path.rpartition(".")[2], 8)
    itself = 0 if config.train.method == "full" else 4
    return weights * (itself + 4 + optimizer + (4 if config.train.ema else 0))


def _unread(kinds: Sequence[list[nn.Module]], counts: Sequence[int]) -> float:
    """The share of weights whose products nobody reads when a block is computed again, of all in blocks."""
    of_kinds = [[layer for layer in kind[0].modules() if isinstance(layer, nn.Linear)] for kind in kinds]
    weights = [[layer.weight.numel() for layer in layers] for layers in of_kinds]
    last = [sum(layer.weight.numel() for layer in layers if isinstance(layer, LastLinear)) for layers in of_kinds]
    whole = sum(count * sum(sizes) for count, sizes in zip(counts, weights, strict=True))
    return sum(count * size for count, size in zip(counts, last, strict=True)) / whole


def _size(line: Line) -> float:
    return line(10_000)


class _Trials:
    """Runs a shortened transformer on no memory."""

    def __init__(
        self, config: Config, family: Family, transformer: Any, kinds: Sequence[list[nn.Module]], text: int
    ) -> None:
        self._config = config
        self._family = family
        self._transformer = transformer
        self._kinds = [kind[:_KEPT] for kind in kinds]
        self._text = text

    def lines(self, again: bool, keeps_attention: bool = False) -> tuple[list[Line], Line]:
        """What a block of each kind keeps, and what there is beside, with or without recomputation."""
        chosen = {id(block) for block in self._family.blocks(self._transformer)} if again else set[int]()
        recompute(self._transformer, chosen, keeps_attention)
        (few, of_few, beside_few), (more, of_more, beside_more) = (self._trial(rows) for rows in (16, 32))
        of_kinds = [Line.through((few, a), (more, b)) for a, b in zip(of_few, of_more, strict=True)]
        return of_kinds, Line.through((few, beside_few), (more, beside_more))

    def _trial(self, rows: int) -> tuple[int, list[float], float]:
        """Tokens of a pass; what a block of each kind kept of it; and at the peak, what all blocks did not."""
        inputs, transformer = self._inputs(rows), self._transformer
        trained = [p for p in transformer.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        known = [*transformer.parameters(), *(p.grad for p in trained), *transformer.buffers()]
        kept: dict[int, int] = {}
        with MemoryCount(known) as count, _watching(self._kinds, count, kept):
            predicted = self._family.velocity(transformer, inputs)
            (predicted - inputs.images).float().square().sum().backward()
        of_kinds = [float(kept[id(kind[-1])]) for kind in self._kinds]
        tokens = sum(inputs.text_lengths) + len(inputs.images)
        return tokens, of_kinds, count.peak - sum(kept.values())

    def _inputs(self, rows: int) -> ModelInputs:
        """Two edits that are not alike, which an ordinary batch would be."""
        family, transformer = self._family, self._transformer
        widths, options = family.widths(transformer), {"device": "meta", "dtype": dtype_of(self._config.model.dtype)}
        shapes = [_edit(rows, columns, family.facts.controls[1] != 0) for columns in (32, 34)]
        width = widths.projected_text if self._config.projects_text and widths.projected_text else widths.text
        text = [
            TextEmbedding(
                torch.empty(self._text, width, **options),  # type: ignore[call-overload]
                torch.empty(widths.pooled, **options) if widths.pooled else None,  # type: ignore[call-overload]
                places=(self._text // 2,) * len(sample.controls) if widths.has_places else (),
            )
            for sample in shapes
        ]
        images = torch.empty(sum(sample.tokens for sample in shapes), widths.image, **options)  # type: ignore[call-overload]
        return ModelInputs(images, shapes, text, torch.empty(2, device="meta"), self._config.train.guidance)


def _edit(rows: int, columns: int, has_control: bool) -> Shapes:
    grid = (1, rows, columns)
    return Shapes((grid,), (grid,) if has_control else ())


@contextmanager
def _watching(kinds: Sequence[Sequence[nn.Module]], count: MemoryCount, kept: dict[int, int]) -> Iterator[None]:
    """Note what each block leaves behind when it first runs forward."""
    before: dict[int, int] = {}

    def enter(block: nn.Module, _: Any) -> None:
        before.setdefault(id(block), count.now)

    def leave(block: nn.Module, *_: Any) -> None:
        kept.setdefault(id(block), count.now - before[id(block)])

    hooks = []
    for kind in kinds:
        for block in kind:
            hooks += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
