"""Checkpoints in diffusers' format: where they are, what identifies them, and their parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qflux.config import ModelSettings
from qflux.errors import CheckpointError
from qflux.files.atomic import write_json
from qflux.files.hashing import key_of
from qflux.models.precision import quantization_config
from qflux.models.registry import local_folder

FETCH = "can't be fetched"
"""What an error says of a hub id that is not on this machine and can't be reached."""
_END = 1 << 20
_REPAIR = "fetch the checkpoint again, or give another one."
_WEIGHTS = "diffusion_pytorch_model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model")


INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"
"""Where a checkpoint says what it is made of."""


def checkpoint_folder(
    pretrained: str, parts: Sequence[str], download: bool = True, files: str = "*", optional: Sequence[str] = ()
) -> Path:
    """The local folder of a checkpoint, downloading (`files` of) the named parts if it is a hub id and they may be.

    Not every checkpoint has `optional` parts.
    """
    folder = local_folder(pretrained)
    if not folder.is_dir():
        if pretrained.count("/") != 1 or pretrained.startswith((".", "/", "~")):
            raise CheckpointError(f"model.pretrained: no folder {pretrained}", "give a diffusers folder or a hub id.")
        try:
            wanted = [INDEX, MODULAR_INDEX, *(f"{part}/{files}" for part in (*parts, *optional))]
            folder = Path(snapshot_download(pretrained, allow_patterns=wanted, local_files_only=not download))
        except Exception as error:
            raise CheckpointError(
                f"model.pretrained: {pretrained} {FETCH}: {error}",
                "check the name, the network and HF_TOKEN (gated models need one), or give a local folder.",
            ) from error
    for part in parts:
        if not (folder / part).is_dir():
            raise CheckpointError(f"{folder} has no folder {part}/", "give a checkpoint in diffusers format.")
    return folder


def load_transformer(loader: Any, settings: ModelSettings, dtype: torch.dtype, device: torch.device) -> Any:
    """The transformer of a checkpoint, or another one in its place, quantized if that is asked for."""
    quantization = quantization_config(settings.quantization, dtype) if settings.quantization else None
    return load_part(loader, *_transformer_folder(settings), dtype, device, quantization)


def empty_transformer(loader: Any, settings: ModelSettings) -> Any:
    """The transformer's layers without their weights, from its description alone; nothing else is fetched."""
    folder, part = _transformer_folder(settings, "config.json")
    try:
        with torch.device("meta"):
            return loader.from_config(loader.load_config(folder, subfolder=part))
    except Exception as error:
        raise CheckpointError(f"{folder / part} can't be read: {error}", _REPAIR) from error


def transformer_layer(settings: ModelSettings, layer: str, download: bool = True) -> dict[str, Tensor]:
    """The weights of one layer of the transformer; of a checkpoint in several files only those with it are fetched."""
    folder, part = _transformer_folder(settings, "*.json", download)
    try:
        files = {_WEIGHTS}
        for index in (folder / part).glob("*.safetensors.index.json"):
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file for name, file in listed.items() if name.startswith(f"{layer}.")}
        found: dict[str, Tensor] = {}
        for file in sorted(files):
            folder, part = _transformer_folder(settings, file, download)
            with safe_open(folder / part / file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.startswith(f"{layer}.")]  # noqa: SIM118
                found |= {name.removeprefix(f"{layer}."): opened.get_tensor(name) for name in names}
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{folder / part} can't be read: {error}", _REPAIR) from error
    if "weight" not in found:
        raise CheckpointError(f"{folder / part} lacks {layer}.weight", _REPAIR)
    return found


def layer_identity(weights: Mapping[str, Tensor]) -> str:
    """What tells the weights of a layer from others."""
    described = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(weights.items())]
    digest = hashlib.sha256()
    for _, tensor in sorted(weights.items()):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return key_of(described, digest.hexdigest())


def _transformer_folder(settings: ModelSettings, files: str = "*", download: bool = True) -> tuple[Path, str]:
    if settings.transformer is None:
        return checkpoint_folder(settings.pretrained, ("transformer",), download, files), "transformer"
    if not settings.transformer.is_dir():
        raise CheckpointError(f"model.transformer: no folder {settings.transformer}", "give a diffusers transformer.")
    return settings.transformer.parent, settings.transformer.name


def transformer_identity(settings: ModelSettings) -> str:
    """What tells this transformer's weights from others: its files' names, sizes, first and last bytes."""
    folder, part = _transformer_folder(settings)
    return identity(folder, (part,), _ends_of)[:16]


def _ends_of(file: Path) -> str:
    """Hashing tens of gigabytes takes longer than an edit; the ends of a file change whenever its weights do."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(_END)
        opened.seek(max(0, size - _END))
        return key_of(size, hashlib.sha256(first + opened.read(_END)).hexdigest())


def load_part(
    loader: Any, folder: Path, part: str, dtype: torch.dtype, device: torch.device, quantization: Any = None
) -> Any:
    """A model of a checkpoint, frozen, in `dtype` on `device`. Weights are safetensors only."""
    options = {"torch_dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    if quantization is not None:
        options["quantization_config"] = quantization
    try:
        model, found = loader.from_pretrained(folder, subfolder=part, **options)
    except Exception as error:
        raise CheckpointError(f"{folder / part} can't be loaded: {error}", _REPAIR) from error
    # The counter of a batch norm is of no use to anybody who does not train it, and not every file has it.
    missing = sorted(key for key in found["missing_keys"] if not key.endswith("num_batches_tracked"))
    if missing:
        raise CheckpointError(f"{folder / part} lacks {len(missing)} weights, {missing[0]} first", _REPAIR)
    if hasattr(model, "lm_head"):  # it would make words of hidden states, which is all that prompts are read for
        model.lm_head = nn.Identity()
    return model.to(device).eval().requires_grad_(False)


def load_other(loader: Any, folder: Path, part: str) -> Any:
    """A tokenizer, a scheduler or an image processor of a checkpoint."""
    if part.startswith("tokenizer") and not any((folder / part / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(f"{folder / part} holds no vocabulary ({', '.join(_TOKENIZER_FILES)})", _REPAIR)
    try:
        return loader.from_pretrained(folder, subfolder=part)
    except Exception as error:
        raise CheckpointError(f"{folder / part} can't be loaded: {error}", _REPAIR) from error


def require_template(tokenizer: Any, folder: Any) -> Any:
    """The tokenizer; an error if it can't write a conversation."""
    if not tokenizer.chat_template:
        raise CheckpointError(f"{folder} has no chat template", _REPAIR)
    return tokenizer


def save_checkpoint(components: Any, folder: Path, pipeline: str) -> None:
    """Write components as a checkpoint that diffusers' `pipeline` loads."""
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": diffusers.__version__}
    for part, component in vars(components).items():
        if component is None:
            continue
        component.save_pretrained(folder / part)
        # A subclass of qflux's is saved under the name of the class it extends, or nothing else could load it.
        library = "transformers" if type(component).__module__.startswith("transformers") else "diffusers"
        index[part] = list(getattr(component, "saved_as", (library, type(component).__name__)))
    write_json(folder / (MODULAR_INDEX if "Modular" in pipeline else INDEX), index)


def identity(folder: Path, parts: Sequence[str], hash_of: Any) -> str:
    """A hash of everything in these parts that changes what they compute."""
    files = [
        file
        for part in parts
        for file in sorted((folder / part).rglob("*"))
        if file.is_file() and not file.name.startswith(".") and file.suffix not in (".md", ".png", ".jpg")
    ]
    return key_of([[str(file.relative_to(folder)), hash_of(file)] for file in files])
