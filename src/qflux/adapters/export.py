"""Writing adapters so that what is written is what was trained: every file is read back before it takes its place."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qflux.adapters.attach import attach, detach, set_weights
from qflux.adapters.files import AdapterFile, Record, read_adapter, write_lora
from qflux.adapters.formats import format_of
from qflux.adapters.layers import LoraLayer, LoraLayers, same
from qflux.adapters.merge import Merged, merge
from qflux.adapters.names import Names
from qflux.data.encoded import TextEmbedding
from qflux.errors import CheckpointError
from qflux.files.atomic import sweep
from qflux.models.family import Family, ModelInputs
from qflux.ragged.shapes import Shapes

__all__ = ["Merged", "merge", "probe", "require_same_output", "save_verified"]

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""How far outputs of a LoRA and of what was written may be apart."""


def save_verified(
    path: Path,
    layers: Mapping[str, LoraLayer],
    form: str,
    names: Names,
    record: Record,
    check: Callable[[AdapterFile], None] = lambda written: None,
) -> None:
    """Write a LoRA in a format, read it back, `check` it, and only then let it replace an older file."""
    for name, layer in layers.items():
        if not bool(layer.down.isfinite().all() and layer.up.isfinite().all()):
            raise CheckpointError(f"{path} is not written: {name} holds NaN or infinite values", "train it again.")
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, path.name)
    folder = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    folder.mkdir(exist_ok=True)
    staging = folder / path.name
    try:
        write_lora(staging, layers, form, names, record)
        written = read_adapter(staging)
        again = written.as_filed(names)
        filed = format_of(form)
        different = same(filed.filed(layers, names), again, filed.rounded(layers, names))
        if different:
            raise CheckpointError(
                f"{path} was not written: read back as {form}, {different} is not what was trained",
                "the previous file, if there was one, is untouched; please report this.",
            )
        check(written)
        staging.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_same_output(
    transformer: nn.Module, family: Family, first: LoraLayers, second: LoraLayers, file: object = "the LoRA"
) -> float:
    """How far the model with one LoRA, of `file`, is from the model with the other, of the output's length.

    Too far is an error.
    """
    outputs = []
    for number, layers in enumerate((first, second)):
        name = f"check_{number}"
        attach(transformer, layers, name)
        set_weights(transformer, {name: 1.0})
        outputs.append(probe(transformer, family))
        detach(transformer, name)
    if not bool(outputs[0].isfinite().all()):
        raise CheckpointError(
            f"{file}: with it the model's output is NaN or infinite",
            "its numbers are damaged, or far too large; train it again.",
        )
    apart = float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
    if not apart <= _TOLERANCE:
        raise CheckpointError(f"the exported LoRA changes the model's output by {apart:.2g}", "please report this.")
    return apart


@torch.no_grad()
def probe(transformer: Any, family: Family) -> Tensor:
    """The model's velocity for two small random samples of different sizes."""
    device, dtype, widths = transformer.device, transformer.dtype, family.widths(transformer)
    random = torch.Generator().manual_seed(0)
    shapes = [Shapes(((1, 4, 6),), ((1, 4, 4),)), Shapes(((1, 6, 4),), ((1, 2, 4),))]
    tokens = sum(sample.tokens for sample in shapes)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    texts = [
        TextEmbedding(draw(length, widths.text), draw(widths.pooled) if widths.pooled else None, places=(3,))
        for length in (7, 12)
    ]
    sigma = torch.tensor([0.3, 0.8], device=device)
    was_training = transformer.training
    transformer.eval()
    output = family.velocity(transformer, ModelInputs(draw(tokens, widths.image), shapes, texts, sigma, 3.5))
    transformer.train(was_training)
    return output.float()
