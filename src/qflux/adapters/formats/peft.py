"""PEFT's own files, `adapter_model.safetensors` with `adapter_config.json` beside it: what `save_pretrained` writes.

A LoRA is read from them. A LoKr or LoHa has no other format: qflux writes one with PEFT's names and settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from qflux.adapters.formats.diffusers import PREFIX
from qflux.adapters.formats.format import Format, without_prefixes
from qflux.adapters.names import Names

_PREFIX = "base_model.model."
_PRODUCT = re.compile(r"\.(lokr_|hada_)")


class PeftFormat(Format):
    """PEFT's names of a LoRA: diffusers' layers behind a prefix of their own."""

    name = "peft"

    def recognises(self, layers: Collection[str]) -> bool:
        return any(name.startswith(_PREFIX) for name in layers)

    def layer_name(self, name: str, names: Names) -> str | None:
        return without_prefixes(name, (_PREFIX, PREFIX, "diffusion_model."))


PEFT = PeftFormat()


def is_product(key: str) -> bool:
    """Whether a tensor is of a LoKr or LoHa."""
    return _PRODUCT.search(key) is not None


def product_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a LoKr or LoHa as they are filed."""
    return {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}


def filed_settings(description: Mapping[str, Any]) -> str:
    """PEFT's settings as diffusers files them, in the metadata."""
    named = {f"{PREFIX}{key}": sorted(v) if isinstance(v, set) else v for key, v in description.items()}
    return json.dumps(named, sort_keys=True)
