"""LoRAs added to a transformer's own weights, and a transformer written as a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from qflux.adapters.layers import LoraLayers
from qflux.files.atomic import new_folder, write_bytes, write_tensors


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
    described = json.loads(transformer.to_json_string())
    described["_class_name"] = described["_class_name"].removeprefix("FSDP")
    name = "diffusion_pytorch_model"
    shards = split_torch_state_dict_into_shards(dict(weights), filename_pattern=f"{name}{{suffix}}.safetensors")
    with new_folder(folder) as staging:
        write_bytes(staging / "config.json", (json.dumps(described, indent=2, sort_keys=True) + "\n").encode())
        for file, keys in shards.filename_to_tensors.items():
            write_tensors(staging / file, {key: weights[key] for key in keys})
        if shards.is_sharded:
            index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
            write_bytes(staging / f"{name}.safetensors.index.json", json.dumps(index, indent=2).encode())
