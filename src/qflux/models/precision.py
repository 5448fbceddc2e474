"""Frozen weights in fewer bits, as diffusers loads them: nf4 through bitsandbytes, int8 and fp8 through torchao."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch
from diffusers import BitsAndBytesConfig, TorchAoConfig

from qflux.errors import ConfigError


def quantization_config(kind: Literal["int8", "nf4", "fp8"], dtype: torch.dtype) -> Any:
    """diffusers' config for a kind of quantization; arithmetic stays in `dtype`."""
    if kind == "nf4":
        _need("bitsandbytes", kind)
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    torchao = _need("torchao.quantization", kind)
    return TorchAoConfig(torchao.Int8WeightOnlyConfig() if kind == "int8" else torchao.Float8WeightOnlyConfig())


def _need(module: str, kind: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"model.quantization: {kind} needs {package} ({error})", f"pip install 'qflux[{package}]'"
        ) from None
