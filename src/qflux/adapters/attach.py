"""Adapters on a transformer, for inference: one or several, each with its weight; and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer as PeftLoraLayer
from peft.utils import set_peft_model_state_dict
from torch import nn

from qflux.adapters.files import AdapterFile, Record, read_adapter
from qflux.adapters.layers import FOREIGN, LoraLayer, LoraLayers
from qflux.adapters.lora import ADAPTER, add, config_from, keep_float32, lora_config
from qflux.config import LoraSettings
from qflux.errors import CheckpointError, ConfigError
from qflux.models.family import Family


@dataclass(frozen=True)
class Weighted:
    """An adapter file and how strongly it counts."""

    path: Path
    weight: float = 1.0


def attach_all(transformer: nn.Module, family: Family, adapters: Sequence[Weighted]) -> list[Record]:
    """Add adapters to a transformer without any; the records of those that have one."""
    files = [read_adapter(adapter.path) for adapter in adapters]
    for file in files:
        file.require_family(family)
    if any(file.is_product for file in files):
        if len(files) > 1:
            raise CheckpointError("LoKr and LoHa adapters can't be combined with others", "use them one at a time.")
        _attach_product(transformer, files[0], adapters[0].weight)
    else:
        loras = [file.layers(family, transformer) for file in files]
        for number, layers in enumerate(loras):
            attach(transformer, layers, f"{ADAPTER}_{number}")
        weights = [adapter.weight for adapter in adapters]
        set_weights(transformer, {f"{ADAPTER}_{number}": weight for number, weight in enumerate(weights)})
    return [file.record for file in files if file.record]


def attach(transformer: nn.Module, layers: Mapping[str, LoraLayer], name: str) -> None:
    """Add a LoRA under `name`. It computes as it did in training: float32 weights, in the base's dtype."""
    add(transformer, lora_config(layers), name)
    keep_float32(transformer)
    for layer_name, layer in layers.items():
        _fill(transformer.get_submodule(layer_name), name, layer)


def detach(transformer: Any, name: str) -> None:
    """Remove an adapter."""
    transformer.delete_adapters(name)


def set_weights(transformer: Any, weights: Mapping[str, float]) -> None:
    """Make these adapters count, and no others."""
    transformer.set_adapters(list(weights), weights=list(weights.values()))


def _fill(module: Any, name: str, layer: LoraLayer) -> None:
    with torch.no_grad():
        module.lora_A[name].weight.copy_(layer.down)
        module.lora_B[name].weight.copy_(layer.up)
        if layer.magnitude is not None:
            module.lora_magnitude_vector[name].weight.copy_(layer.magnitude)


def start_from(transformer: Any, file: AdapterFile, layers: LoraLayers, lora: LoraSettings) -> None:
    """Give the adapter that is about to train the weights of another one: it then computes the same.

    The other one may have a smaller rank; what is left keeps its random start, which counts for nothing yet.
    """
    if file.is_product != (lora.type in ("lokr", "loha")):
        raise CheckpointError(f"lora.init_from: {file.path} is no {lora.type}", "set lora.type to what it is.")
    if file.is_product:
        tensors = {key.removeprefix("transformer."): tensor for key, tensor in file.tensors.items()}
        try:
            found = set_peft_model_state_dict(transformer, tensors, ADAPTER)
        except RuntimeError as error:
            raise CheckpointError(f"lora.init_from: {file.path} does not fit: {error}", FOREIGN) from error
        if found.unexpected_keys:
            raise CheckpointError(f"lora.init_from: {file.path} has {found.unexpected_keys[0]}, which does not train")
        return
    trained = {name: m for name, m in transformer.named_modules() if isinstance(m, PeftLoraLayer)}
    surplus = sorted(layers.keys() - trained.keys())
    if surplus:
        raise CheckpointError(
            f"lora.init_from: {file.path} has {surplus[0]}, which does not train ({len(surplus)} such layers)",
            "add it to lora.target_modules.",
        )
    for name, layer in layers.items():
        module = trained[name]
        if layer.rank > module.r[ADAPTER]:
            problem = (
                f"lora.init_from: {file.path} is of rank {layer.rank} in {name}, and {module.r[ADAPTER]} would train"
            )
            raise CheckpointError(problem, f"set lora.rank to {layer.rank} or more.")
        if (layer.magnitude is None) != (lora.type == "lora"):
            kind = "lora" if layer.magnitude is None else "dora"
            raise CheckpointError(f"lora.init_from: {file.path} is a {kind}", f"set lora.type to {kind}.")
        strength = layer.alpha / layer.rank / float(module.scaling[ADAPTER])
        with torch.no_grad():
            module.lora_A[ADAPTER].weight[: layer.rank].copy_(layer.down)
            module.lora_B[ADAPTER].weight[:, : layer.rank].copy_(layer.up * strength)
            if layer.magnitude is not None:
                module.lora_magnitude_vector[ADAPTER].weight.copy_(layer.magnitude)


def _attach_product(transformer: Any, file: AdapterFile, weight: float) -> None:
    """LoKr and LoHa: through PEFT, from the file's own description."""
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in file.tensors.items()}
    for key, tensor in tensors.items():
        if not bool(tensor.float().isfinite().all()):
            raise CheckpointError(f"{file.path}: {key} holds NaN or infinite values", "train it again.")
    alpha = file.description.get("alpha", 1)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{file.path}: its settings say alpha: {alpha}", FOREIGN)
    try:
        add(transformer, config_from(file.description), ADAPTER)
        found = set_peft_model_state_dict(transformer, tensors, ADAPTER)
    except (KeyError, RuntimeError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{file.path} does not fit the model: {error}", FOREIGN) from error
    lacking = [key for key in found.missing_keys if ".lokr_" in key or ".hada_" in key]
    if found.unexpected_keys or lacking:
        odd = sorted([*found.unexpected_keys, *lacking])[0]
        raise CheckpointError(f"{file.path} does not fit the model: {odd} is in one of them only", FOREIGN)
    set_weights(transformer, {ADAPTER: weight})
