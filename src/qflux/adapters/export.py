"""Writing adapters so that what is written is what was trained: every file is read back before it takes its place."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from qflux.adapters.attach import attach, detach, set_weights
from qflux.adapters.files import AdapterFile, Record, read_adapter, write_lora
from qflux.adapters.formats import Format
from qflux.adapters.layers import LoraLayer, LoraLayers, same
from qflux.adapters.names import Names
from qflux.data.encoded import TextEmbedding
from qflux.errors import CheckpointError
from qflux.files.atomic import write_bytes, write_tensors
from qflux.models.family import Family, ModelInputs

logger = logging.getLogger(__name__)


def save_verified(
    path: Path,
    layers: Mapping[str, LoraLayer],
    form: Format,
    names: Names,
    record: Record,
    check: Callable[[AdapterFile], None] = lambda written: None,
) -> None:
    """Write a LoRA in a format, read it back, `check` it, and only then let it replace an older file."""
    for name, layer in layers.items():
        if not bool(layer.down.isfinite().all() and layer.up.isfinite().all()):
            raise CheckpointError(f"{path} is not written: {name} holds values that are no numbers", "train it again.")
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.check.safetensors")
    try:
        write_lora(staging, layers, form, names, record)
        written = read_adapter(staging)
        again = written.as_filed(names)
        different = same(layers, again, names.rounded(layers) if form == "comfyui" else ())
        if different:
            raise CheckpointError(
                f"{path} was not written: read back as {form}, {different} is not what was trained",
                "the previous file, if there was one, is untouched; please report this.",
            )
        check(written)
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)


def require_same_output(
    transformer: nn.Module, family: Family, first: LoraLayers, second: LoraLayers, tolerance: float = 1e-4
) -> float:
    """How far the model with one LoRA is from the model with the other, of the output's length; too far is an error."""
    outputs = []
    for number, layers in enumerate((first, second)):
        name = f"check_{number}"
        attach(transformer, layers, name)
        set_weights(transformer, {name: 1.0})
        outputs.append(probe(transformer, family))
        detach(transformer, name)
    apart = float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
    if not apart <= tolerance:
        raise CheckpointError(f"the exported LoRA changes the model's output by {apart:.2g}", "please report this.")
    return apart


@torch.no_grad()
def probe(transformer: Any, family: Family) -> Tensor:
    """The model's velocity for two small random samples of different sizes."""
    config, device, dtype = transformer.config, transformer.device, transformer.dtype
    random = torch.Generator().manual_seed(0)
    shapes = [[(1, 4, 6), (1, 4, 4)], [(1, 6, 4), (1, 2, 4)]]
    tokens = sum(rows * columns for sample in shapes for _, rows, columns in sample)
    pooled = getattr(config, "pooled_projection_dim", None)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    texts = [
        TextEmbedding(draw(length, config.joint_attention_dim), draw(pooled) if pooled else None) for length in (7, 12)
    ]
    sigma = torch.tensor([0.3, 0.8], device=device)
    was_training = transformer.training
    transformer.eval()
    output = family.velocity(transformer, ModelInputs(draw(tokens, config.in_channels), shapes, texts, sigma, 3.5))
    transformer.train(was_training)
    return output.float()


@dataclass(frozen=True)
class Merged:
    """What merging did."""

    layers: int
    lost: float
    """The share of the change that rounding to the base's dtype has swallowed."""


@torch.no_grad()
def merge(transformer: nn.Module, loras: Sequence[tuple[LoraLayers, float]]) -> Merged:
    """Add LoRAs, each with its weight, to a transformer's own weights."""
    names = dict.fromkeys(name for layers, _ in loras for name in layers)
    wanted = lost = 0.0
    for name in names:
        weight = transformer.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        before = after = weight.float()
        for layers, strength in loras:
            if name in layers:
                after = layers[name].to(after.device).added_to(after, before, strength)
        weight.copy_(after)
        wanted += float((after - before).square().sum())
        lost += float((weight.float() - after).square().sum())
    return Merged(len(names), (lost / wanted) ** 0.5 if wanted else 0.0)


def write_transformer(transformer: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """A folder that `from_pretrained` loads; it replaces an older one only when it is complete."""
    staging = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    described = json.loads(transformer.to_json_string())
    described["_class_name"] = described["_class_name"].removeprefix("FSDP")
    write_bytes(staging / "config.json", (json.dumps(described, indent=2, sort_keys=True) + "\n").encode())
    name = "diffusion_pytorch_model"
    shards = split_torch_state_dict_into_shards(dict(weights), filename_pattern=f"{name}{{suffix}}.safetensors")
    for file, keys in shards.filename_to_tensors.items():
        write_tensors(staging / file, {key: weights[key] for key in keys})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        write_bytes(staging / f"{name}.safetensors.index.json", json.dumps(index, indent=2).encode())
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
