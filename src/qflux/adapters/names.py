"""Layer names: diffusers' own, and those of the models as their authors published them.

Where a published layer is several of diffusers' (FLUX has query, key and value in one), LoRAs of the parts become one
LoRA of the whole, whose up projection has a block per part and zeros elsewhere; and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from qflux.adapters.layers import FOREIGN, LoraLayer, LoraLayers
from qflux.errors import CheckpointError

_LEAST = 1e-20
"""Of a strength that anything can be divided by."""

Parts = Mapping[str, list[list[float]]]
"""Rank and alpha of each part of a fused layer."""


@dataclass(frozen=True)
class Names:
    """The layers of one model: outputs and inputs by diffusers' name, and what they are called elsewhere."""

    shapes: Mapping[str, tuple[int, int]]
    prefix: str
    """Of diffusers' LoRA keys."""
    fused: Mapping[str, tuple[str, ...]]
    """The original name of a layer, and the layers of diffusers it consists of. Others have one name only."""
    swapped: frozenset[str] = frozenset()
    """Original names of layers whose outputs are two halves, which diffusers has in the other order."""
    takes_alphas: bool = True
    """diffusers' pipeline reads alphas."""
    keeps_others: bool = False
    """Layers that are in no fused one are called the same elsewhere; otherwise they have no counterpart."""

    def is_original(self, layers: Iterable[str]) -> bool:
        return any(name in self.fused for name in layers)

    def dotted(self, flat: str) -> str | None:
        """The name, diffusers' or original, that is spelled like this with underscores for dots."""
        return self._flat.get(flat)

    @cached_property
    def _flat(self) -> dict[str, str]:
        return {name.replace(".", "_"): name for name in (*self.shapes, *self.fused)}

    @cached_property
    def _within(self) -> dict[str, str]:
        """The original name of each layer of diffusers."""
        return {member: original for original, members in self.fused.items() for member in members}

    def to_original(self, layers: Mapping[str, LoraLayer]) -> LoraLayers:
        """LoRA layers under original names. Fused ones have the ranks of their parts, one after another."""
        within = self._within
        result: LoraLayers = {}
        for name, layer in layers.items():
            if self.fused and name not in within and not self.keeps_others:
                raise CheckpointError(
                    f"{name} has no counterpart in the original model", "export as diffusers, or train without it."
                )
            original = within.get(name, name)
            if original in result:
                continue
            members = self.fused.get(original, (name,))
            joined = layer if len(members) == 1 else self._together(original, members, layers)
            result[original] = _halves_swapped(joined) if original in self.swapped else joined
        return result

    def rounded(self, layers: Mapping[str, LoraLayer]) -> set[str]:
        """Layers whose way there and back rounds: fused ones whose parts differ in strength."""
        found: set[str] = set()
        for members in self.fused.values():
            present = [member for member in members if member in layers]
            if len({layers[member].scale for member in present}) > 1:
                found |= set(present)
        return found

    def parts(self, layers: Mapping[str, LoraLayer]) -> Parts:
        """Rank and alpha of the parts of each fused layer, 0 where there is none: with them the way back is exact."""
        within = self._within
        originals = {within[name] for name in layers if name in within and len(self.fused[within[name]]) > 1}
        return {
            original: [
                [layers[member].rank, layers[member].alpha] if member in layers else [0, 0.0]
                for member in self.fused[original]
            ]
            for original in sorted(originals)
        }

    def to_diffusers(self, file: object, layers: Mapping[str, LoraLayer], parts: Parts | None = None) -> LoraLayers:
        """The inverse of `to_original`. If the file does not say what was put together, every part takes all of it."""
        result: LoraLayers = {}
        for name, layer in layers.items():
            members = self.fused.get(name, (name,))
            if len(members) == 1:
                found = {members[0]: _halves_swapped(layer) if name in self.swapped else layer}
            else:
                found = self._apart(file, name, members, layer, (parts or {}).get(name))
            twice = sorted(found.keys() & result.keys())
            if twice:
                raise CheckpointError(f"{file}: {twice[0]} is there twice, once as part of {name}", FOREIGN)
            result |= found
        return result

    def _together(self, original: str, members: tuple[str, ...], layers: Mapping[str, LoraLayer]) -> LoraLayer:
        present = [layers[member] for member in members if member in layers]
        if any(layer.magnitude is not None for layer in present):
            raise CheckpointError(f"DoRA of {original} can't be put together: its parts have norms of their own")
        # One alpha serves the whole: parts of another strength carry the difference in their up projection.
        rank = sum(layer.rank for layer in present)
        scale = present[0].scale
        outputs = [self.shapes[member][0] for member in members]
        up = present[0].up.new_zeros(sum(outputs), rank)
        row = column = 0
        for member, count in zip(members, outputs, strict=True):
            layer = layers.get(member)
            if layer is not None:
                factor = layer.scale / scale
                up[row : row + count, column : column + layer.rank] = layer.up if factor == 1 else layer.up * factor
                column += layer.rank
            row += count
        return LoraLayer(torch.cat([layer.down for layer in present]), up, scale * rank)

    def _apart(
        self, file: object, name: str, members: tuple[str, ...], layer: LoraLayer, parts: list[list[float]] | None
    ) -> LoraLayers:
        outputs = [self.shapes[member][0] for member in members]
        if len(layer.up) != sum(outputs):
            raise CheckpointError(f"{file}: {name} has {len(layer.up)} outputs, the model {sum(outputs)}", FOREIGN)
        ups = layer.up.split(outputs)
        if parts is None:
            # DoRA has a norm per output, so magnitudes go with their rows; also of parts that nothing else changes.
            norms = [None] * len(members) if layer.magnitude is None else list(layer.magnitude.split(outputs))
            rows = zip(members, ups, norms, strict=True)
            kept = [(member, up, norm) for member, up, norm in rows if norm is not None or bool(up.any())]
            return {member: LoraLayer(layer.down, up, layer.alpha, norm) for member, up, norm in kept}
        if len(parts) != len(members) or sum(int(rank) for rank, _ in parts) != layer.rank:
            raise CheckpointError(f"{file}: {name} has rank {layer.rank}, its description says {parts}", FOREIGN)
        result, start = {}, 0
        for member, up, (rank, alpha) in zip(members, ups, parts, strict=True):
            columns = slice(start, start + int(rank))
            if rank:
                if not abs(layer.scale) > _LEAST:
                    raise CheckpointError(f"{file}: the alpha of {name} is {layer.alpha:g}", "train it again.")
                factor = alpha / rank / layer.scale
                own = up[:, columns].contiguous() if factor == 1 else up[:, columns] / factor
                result[member] = LoraLayer(layer.down[columns].contiguous(), own, alpha)
            start = columns.stop
        return result


def _halves_swapped(layer: LoraLayer) -> LoraLayer:
    """The same LoRA for a layer whose first half of outputs is the other's second."""
    magnitude = None if layer.magnitude is None else torch.cat(layer.magnitude.chunk(2)[::-1])
    return replace(layer, up=torch.cat(layer.up.chunk(2)[::-1]), magnitude=magnitude)
