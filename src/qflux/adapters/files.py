"""Adapter files in diffusers' format: `pytorch_lora_weights.safetensors`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qflux.adapters.lora import ADAPTER
from qflux.data.store import file_hash, write_tensors
from qflux.errors import CheckpointError

logger = logging.getLogger(__name__)

FILE_NAME = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."


def save_adapter(transformer: nn.Module, folder: Path) -> Path:
    """Write the adapter as diffusers' pipelines do; an older file is replaced in one step."""
    weights = get_peft_model_state_dict(transformer, adapter_name=ADAPTER)
    settings = transformer.peft_config[ADAPTER].to_dict()  # type: ignore[index,union-attr]
    named = {f"{PREFIX}{key}": sorted(v) if isinstance(v, set) else v for key, v in settings.items()}
    write_tensors(
        folder / FILE_NAME,
        {f"{PREFIX}{name}": tensor for name, tensor in weights.items()},
        {LORA_ADAPTER_METADATA_KEY: json.dumps(named, sort_keys=True)},
    )
    return folder / FILE_NAME


def load_adapter(transformer: nn.Module, path: Path, scale: float = 1.0) -> None:
    """Add the adapter in `path` (a file, or a folder that holds one) to `transformer` for inference.

    A key the model lacks, or a layer the file should have and lacks, is an error.
    """
    file = path / FILE_NAME if path.is_dir() else path
    weights = _read(file)
    foreign = sorted(key for key in weights if not key.startswith(PREFIX))
    if foreign:
        raise CheckpointError(f"{file}: {foreign[0]} is not a transformer key", "give a LoRA in diffusers format.")
    modules = dict(transformer.named_modules())
    for key in sorted(weights):
        name = key.removeprefix(PREFIX).rsplit(".lora_", 1)[0]
        if name not in modules:
            raise CheckpointError(f"{file}: the model has no layer {name} (key {key})", "is it for another family?")
    transformer.load_lora_adapter(  # type: ignore[operator]
        weights, prefix=PREFIX.rstrip("."), adapter_name=ADAPTER, metadata=_adapter_metadata(file)
    )
    transformer.set_adapters([ADAPTER], weights=[scale])  # type: ignore[operator]
    logger.info("LoRA %s (%s), %d tensors, scale %g", file, file_hash(file)[:12], len(weights), scale)


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(f"no LoRA file at {file}", f"give a .safetensors file or a folder with {FILE_NAME}.")
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from None


def _adapter_metadata(file: Path) -> dict[str, object] | None:
    """Rank, alpha and targets as diffusers stored them."""
    with safe_open(file, framework="pt") as opened:
        raw = (opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
    return json.loads(raw) if raw else None
