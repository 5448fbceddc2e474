"""In what precision weights are kept and computed with.

Frozen weights may be kept in fewer bits, as diffusers loads them: nf4 through bitsandbytes, int8 and fp8 through
torchao. ADD A PRECISION HERE: a line in `_KINDS`, and its name in `ModelSettings.quantization`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from diffusers import BitsAndBytesConfig, TorchAoConfig
from torch import nn

from qflux.errors import ConfigError


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a config calls by this name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """diffusers' config for a kind of quantization; arithmetic stays in `dtype`."""
    module, make = _KINDS[kind]
    return make(_need(module, kind), dtype)


_BYTES = {"nf4": 0.5625, "int8": 1.0, "fp8": 1.0}
"""Of a weight, with its share of a scale."""


def weight_bytes(module: nn.Module, quantization: str | None) -> int:
    """What the weights of a module take; quantized are those of linear layers."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    if quantization is None:
        return total
    linear = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    saved = sum(weight.numel() * (weight.element_size() - _BYTES[quantization]) for weight in linear)
    return int(total - saved)


def _nf4(bitsandbytes: Any, dtype: torch.dtype) -> Any:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def _int8(torchao: Any, dtype: torch.dtype) -> Any:
    return TorchAoConfig(torchao.Int8WeightOnlyConfig())


def _fp8(torchao: Any, dtype: torch.dtype) -> Any:
    return TorchAoConfig(torchao.Float8WeightOnlyConfig())


_KINDS: dict[str, tuple[str, Callable[[Any, torch.dtype], Any]]] = {
    "nf4": ("bitsandbytes", _nf4),
    "int8": ("torchao.quantization", _int8),
    "fp8": ("torchao.quantization", _fp8),
}


def _need(module: str, kind: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"model.quantization: {kind} needs {package} ({error})", f"pip install 'qflux[{package}]'"
        ) from None
