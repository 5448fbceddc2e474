"""Layers under the names that a model's authors published them with, of models that number two kinds of blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

Parts = Mapping[str, tuple[str, ...]]
"""An original name, and the layers of diffusers that it consists of."""


def names_of_blocks(top: Parts, double: Parts, single: Parts) -> Callable[[Iterable[str]], dict[str, tuple[str, ...]]]:
    """From the layers beside the blocks, and those of a double- and of a single-stream block."""
    kinds = (("double_blocks", "transformer_blocks", double), ("single_blocks", "single_transformer_blocks", single))
    return partial(_names, top, kinds)


def _names(top: Parts, kinds: Iterable[tuple[str, str, Parts]], layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The original name of each layer, and the layers of diffusers that it consists of, for a model with these."""
    known = set(layers)
    names: dict[str, tuple[str, ...]] = {original: parts for original, parts in top.items() if parts[0] in known}
    for theirs, ours, parts in kinds:
        numbers = {int(found[1]) for name in known if (found := re.match(rf"{ours}\.(\d+)\.", name))}
        for number in sorted(numbers):
            for original, members in parts.items():
                names[f"{theirs}.{number}.{original}"] = tuple(f"{ours}.{number}.{member}" for member in members)
    return names
