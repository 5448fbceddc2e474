"""Adapter files: tensors under the names of a format, and a record of how they were made."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qflux.adapters.file_names import FILE_NAME, PEFT_CONFIG, PEFT_FILE
from qflux.adapters.formats import format_of, from_tensors
from qflux.adapters.formats.peft import filed_settings, is_product, product_tensors
from qflux.adapters.layers import FOREIGN, LoraLayer, LoraLayers, linear_layers, require_fitting
from qflux.adapters.lora import lora_config
from qflux.adapters.names import Names, Parts
from qflux.config import Config
from qflux.errors import CheckpointError, cut
from qflux.files.atomic import write_tensors
from qflux.models.family import Family
from qflux.version import VERSION

logger = logging.getLogger(__name__)

RECORD_KEY = "qflux"


@dataclass(frozen=True)
class Record:
    """What an adapter file says about itself: enough to use it as it was trained."""

    family: str
    version: str = VERSION
    preprocessing: dict[str, Any] = field(default_factory=dict)
    """`data.processor` of the run."""
    timesteps: dict[str, Any] = field(default_factory=dict)
    """`loss.timesteps` of the run: density and shift."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The rest of the configuration, without places on somebody's disk."""
    together: Parts = field(default_factory=dict)
    """What fused layers consist of."""
    controls_from: int = 1
    """The control that entry 0 of a list for controls in `preprocessing` is for. Files of before November 2026 do not
    say it, and there it is the second one."""

    @classmethod
    def of(cls, config: Config) -> Record:
        recorded = config.marked("record")
        recipe = {name: recorded[name] for name in ("seed", "lora", "optimizer", "loss", "train", "model")}
        start = recipe["lora"].pop("init_from")
        recipe["lora"] |= {"init_from": Path(start).name} if start else {}
        # Of places on somebody's disk, names only.
        pretrained = str(recipe["model"]["pretrained"])
        recipe["model"]["pretrained"] = Path(pretrained).name if Path(pretrained).exists() else pretrained
        return cls(
            config.family,
            preprocessing=recorded["data"]["processor"],
            timesteps=recorded["loss"]["timesteps"],
            recipe=recipe,
            controls_from=0,
        )


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as it was read."""

    path: Path
    tensors: dict[str, Tensor]
    record: Record | None
    description: dict[str, Any]
    """PEFT's settings, as diffusers files them; empty if there are none."""

    @property
    def is_product(self) -> bool:
        """LoKr or LoHa."""
        return any(map(is_product, self.tensors))

    def layers(self, family: Family, transformer: nn.Module) -> LoraLayers:
        """Its LoRA for this model; one that does not fit is an error with the layer's name."""
        self.require_family(family)
        names = names_of(family, transformer)
        layers = self.as_filed(names)
        require_fitting(self.path, layers, names.shapes)
        self._require_complete(layers, names)
        return layers

    def as_filed(self, names: Names) -> LoraLayers:
        """Its LoRA under diffusers' names, whether it fits the model or not."""
        together = self.record.together if self.record else None
        return from_tensors(self.path, self.tensors, names, self._alpha, together)

    def _alpha(self, name: str, rank: int) -> float:
        """What PEFT's settings say about a layer without an alpha tensor; its rank if there are none."""
        patterns = self.description.get("alpha_pattern") or {}
        alpha = self.description.get("lora_alpha", rank)
        try:
            if not isinstance(patterns, Mapping):
                raise TypeError(f"alpha_pattern is {patterns!r}")
            own = next((patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", name)), alpha)
            return float(own) * (math.sqrt(rank) if self.description.get("use_rslora") else 1.0)
        except (TypeError, ValueError, AttributeError, re.error) as error:
            raise CheckpointError(f"{self.path}: its settings have no alpha for {name}: {error}", FOREIGN) from None

    def _require_complete(self, layers: LoraLayers, names: Names) -> None:
        """Every layer that the file's own record names is there.

        Patterns may have taken some out. They are a stranger's regular expressions, and are not run.
        """
        lora = self.record.recipe.get("lora") if self.record else None
        targets = lora.get("target_modules") if isinstance(lora, dict) and not lora.get("patterns") else None
        for target in targets if isinstance(targets, list) else []:
            wanted = [name for name in names.shapes if name == target or name.endswith(f".{target}")]
            lacking = sorted(name for name in wanted if name not in layers)
            if lacking:
                raise CheckpointError(f"{self.path}: it lacks {lacking[0]}, which its own record names", FOREIGN)

    def require_family(self, family: Family) -> None:
        if self.record and self.record.family != family.name:
            raise CheckpointError(
                f"{self.path} was trained for {self.record.family}, the config says {family.name}",
                "set family to the one it was trained for.",
            )


def names_of(family: Family, transformer: nn.Module) -> Names:
    """The layers of a family's model, and what they are called."""
    shapes = linear_layers(transformer)
    names = family.original_names(shapes)
    return Names(shapes, family.lora_prefix, names, family.swapped_names, family.lora_alphas, family.keeps_names)


def write_lora(path: Path, layers: Mapping[str, LoraLayer], form: str, names: Names, record: Record) -> None:
    """Write a LoRA in a format; an older file is replaced in one step."""
    chosen = format_of(form)
    layers = chosen.filed(layers, names)
    record = Record(**{**asdict(record), "together": chosen.parts(layers, names)})
    ranks = sorted({layer.rank for layer in layers.values()})
    alphas = sorted({layer.alpha for layer in layers.values()})
    metadata = {
        RECORD_KEY: json.dumps(asdict(record), sort_keys=True),
        "ss_network_module": "networks.lora",  # what kohya's tools show
        "ss_network_dim": ", ".join(map(str, ranks)),
        "ss_network_alpha": ", ".join(f"{alpha:g}" for alpha in alphas),
        "software": f"qflux {record.version}",
    }
    if chosen.strength_in_metadata(layers, names):
        metadata[LORA_ADAPTER_METADATA_KEY] = filed_settings(lora_config(layers).to_dict())
    write_tensors(path, chosen.write(layers, names), metadata)


def write_product(path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any], record: Record) -> None:
    """Write a LoKr or LoHa with PEFT's own names and settings."""
    metadata = {
        LORA_ADAPTER_METADATA_KEY: filed_settings(description),
        RECORD_KEY: json.dumps(asdict(record), sort_keys=True),
    }
    write_tensors(path, product_tensors(tensors), metadata)


def read_adapter(path: Path) -> AdapterFile:
    """An adapter file, or the one in a folder: ours and diffusers', or PEFT's own."""
    file = path
    if path.is_dir():
        file = next((path / name for name in (FILE_NAME, PEFT_FILE) if (path / name).is_file()), path / FILE_NAME)
    if not file.is_file():
        raise CheckpointError(f"no LoRA file at {file}", f"give a .safetensors file or a folder with {FILE_NAME}.")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from None
    if not tensors:
        raise CheckpointError(f"{file} holds no tensors", FOREIGN)
    description = _mapping(file, metadata.get(LORA_ADAPTER_METADATA_KEY)) or _beside(file, tensors)
    described = {key.removeprefix("transformer."): value for key, value in description.items()}
    return AdapterFile(file, tensors, _record(file, metadata.get(RECORD_KEY)), described)


def _beside(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What PEFT's `save_pretrained` says about its file, in another one: the strength is nowhere else."""
    config = file.with_name(PEFT_CONFIG)
    if file.name != PEFT_FILE:
        return {}
    if config.is_file():
        return _mapping(config, config.read_text(encoding="utf-8", errors="replace"))
    if not any(key.endswith(".alpha") for key in tensors):
        logger.warning("%s: there is no %s beside it; its strength is taken to be 1", file, PEFT_CONFIG)
    return {}


_KINDS: dict[str, type] = {"family": str, "version": str, "controls_from": int}


def _record(file: Path, text: str | None) -> Record | None:
    values = _mapping(file, text)
    if not values:
        return None
    known = {key: value for key, value in values.items() if key in Record.__dataclass_fields__}
    for key, value in known.items():
        if not isinstance(value, _KINDS.get(key, dict)):
            raise CheckpointError(f"{file}: its record says {key}: {cut(value)}", FOREIGN)
    if "family" not in known:
        raise CheckpointError(f"{file}: its record names no family", FOREIGN)
    return Record(**known)


def _mapping(file: Path, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:  # brackets within brackets, a hundred thousand deep
        raise CheckpointError(f"{file}: its description can't be read: {error}", FOREIGN) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: its description is {cut(value)}, not a mapping", FOREIGN)
    return value
