"""Adapter files in diffusers' format: `pytorch_lora_weights.safetensors`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.tuners.lycoris_utils import LycorisLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qflux.adapters.lora import ADAPTER, add, config_from
from qflux.data.store import file_hash, write_tensors
from qflux.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

FILE_NAME = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."


def adapter_weights(transformer: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors under diffusers' names; shared out if the transformer is."""
    weights = get_peft_model_state_dict(transformer, adapter_name=ADAPTER)
    return {f"{PREFIX}{name}": tensor for name, tensor in weights.items()}


def save_adapter(transformer: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> Path:
    """Write an adapter as diffusers' pipelines do; an older file is replaced in one step."""
    settings = transformer.peft_config[ADAPTER].to_dict()  # type: ignore[index,union-attr]
    named = {f"{PREFIX}{key}": sorted(v) if isinstance(v, set) else v for key, v in settings.items()}
    write_tensors(folder / FILE_NAME, weights, {LORA_ADAPTER_METADATA_KEY: json.dumps(named, sort_keys=True)})
    return folder / FILE_NAME


def load_adapter(transformer: nn.Module, path: Path, scale: float = 1.0) -> None:
    """Add the adapter in `path` (a file, or a folder that holds one) to `transformer` for inference.

    A key the model lacks, or a layer the file should have and lacks, is an error.
    """
    file = path / FILE_NAME if path.is_dir() else path
    weights, metadata = _read(file)
    if str((metadata or {}).get(f"{PREFIX}peft_type", "LORA")).endswith("LORA"):
        _check(file, weights, metadata, transformer)
        try:
            transformer.load_lora_adapter(  # type: ignore[operator]
                weights, prefix=PREFIX.rstrip("."), adapter_name=ADAPTER, metadata=metadata
            )
        except Exception as error:
            raise CheckpointError(f"{file} does not fit the model: {error}", _FOREIGN) from error
        transformer.set_adapters([ADAPTER], weights=[scale])  # type: ignore[operator]
    else:
        _load_product(file, transformer, weights, metadata or {}, scale)
    logger.info("adapter %s (%s), %d tensors, scale %g", file, file_hash(file)[:12], len(weights), scale)


def _load_product(
    file: Path, transformer: nn.Module, weights: dict[str, Tensor], metadata: dict[str, object], scale: float
) -> None:
    """LoKr and LoHa, which diffusers does not load: through PEFT, from the file's own description."""
    description = {key.removeprefix(PREFIX): value for key, value in metadata.items()}
    try:
        add(transformer, config_from(description))
        found = set_peft_model_state_dict(
            transformer, {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}, ADAPTER
        )
    except (KeyError, RuntimeError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{file} does not fit the model: {error}", _FOREIGN) from error
    lacking = [key for key in found.missing_keys if ".lokr_" in key or ".hada_" in key]
    if found.unexpected_keys or lacking:
        odd = sorted([*found.unexpected_keys, *lacking])[0]
        raise CheckpointError(f"{file} does not fit the model: {odd} is in one of them only", _FOREIGN)
    for layer in transformer.modules():
        if isinstance(layer, LycorisLayer):
            layer.set_scale(ADAPTER, scale)


def _check(file: Path, weights: dict[str, Tensor], metadata: dict[str, object] | None, transformer: nn.Module) -> None:
    """Every tensor belongs to a layer of the model, comes in a pair of one rank, fits in width, and is a number.

    Every layer that the file's own description names is there.
    """
    if not weights:
        raise CheckpointError(f"{file} holds no tensors", _FOREIGN)
    modules = dict(transformer.named_modules())
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(weights.items()):
        name, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        if not key.startswith(PREFIX) or part not in ("A.weight", "B.weight", "magnitude_vector"):
            raise CheckpointError(f"{file}: {key} is no LoRA weight of a transformer", _FOREIGN)
        if name not in modules:
            raise CheckpointError(f"{file}: the model has no layer {name} (key {key})", _FOREIGN)
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{file}: {key} holds values that are no numbers", "train it again.")
        if part != "magnitude_vector":
            layers.setdefault(name, {})[part[0]] = tensor
    for name, pair in layers.items():
        if pair.keys() != {"A", "B"}:
            raise CheckpointError(f"{file}: {name} has only lora_{next(iter(pair))} of the two", _FOREIGN)
        layer = modules[name]
        shapes = tuple(pair["A"].shape), tuple(pair["B"].shape)
        expected = (len(pair["A"]), layer.in_features), (layer.out_features, len(pair["A"]))
        if shapes != expected:
            raise CheckpointError(f"{file}: {name} has shapes {shapes}, the model needs {expected}", _FOREIGN)

    targets = (metadata or {}).get(f"{PREFIX}target_modules")
    for target in targets if isinstance(targets, list) else []:
        lacking = sorted(n for n in modules.keys() - layers.keys() if n == target or n.endswith(f".{target}"))
        if lacking:
            raise CheckpointError(f"{file}: it lacks {lacking[0]}, which its own description names", _FOREIGN)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, object] | None]:
    """The tensors, and rank, alpha and targets as diffusers stored them."""
    if not file.is_file():
        raise CheckpointError(f"no LoRA file at {file}", f"give a .safetensors file or a folder with {FILE_NAME}.")
    try:
        with safe_open(file, framework="pt") as opened:
            raw = (opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
            weights = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        metadata = json.loads(raw) if raw else None
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: its description can't be read: {error}", _FOREIGN) from None
    if metadata is not None and not isinstance(metadata, dict):
        raise CheckpointError(f"{file}: its description is {metadata!r}, not a mapping", _FOREIGN)
    return weights, metadata


_FOREIGN = "give a complete LoRA in diffusers format, made for this model."
