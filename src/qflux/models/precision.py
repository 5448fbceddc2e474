"""In what precision weights are kept and computed with.

Frozen weights of blocks may be computed with in 8 bits (`ragged.eightbit`), or all only be kept in fewer bits, as
diffusers loads them: nf4 through bitsandbytes, int8 and fp8 through torchao. ADD A PRECISION
HERE: a line in `_KINDS`, and its name in `ModelSettings.quantization`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from diffusers import BitsAndBytesConfig, TorchAoConfig
from torch import nn

from qflux.config import Config
from qflux.errors import ConfigError
from qflux.ragged import fused
from qflux.ragged.eightbit.linear import EightBitLinear, EightBitWeight, is_eight_bit

logger = logging.getLogger(__name__)


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a config calls by this name."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """diffusers' config for a kind of quantization; arithmetic stays in `dtype`."""
    module, make = _KINDS[kind]
    return make(_need(module, kind), dtype)


EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What `model.precision` calls the kinds that are computed with."""


_LEAST = {"fp8": (8, 9), "int8": (8, 0)}
"""The compute capability that a GPU needs; the fastest first."""
SPEED = {"fp8": 1.5, "int8": 1.1}
"""How much faster products are than in 16 bits, with what 8 bits take around them; int8's is a guess."""


def settled(config: Config, device: torch.device) -> Config:
    """The same config with what the device can do for `model.precision`: where "auto" ends, and what can't be done.

    For a card that is not here, of which only the memory is known, 8 bits are what common ones of today can do.
    """
    asked = config.model.precision
    if asked == "auto" and device.type != "cuda":
        found = "fp8" if config.memory is not None else None
    elif asked == "auto":
        can = torch.cuda.get_device_capability(device) if fused.HAS_TRITON else (0, 0)
        found = next((kind for kind, least in _LEAST.items() if can >= least), None)
    else:
        found = _runnable(asked, device)
    if found == asked:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"precision": found})})


def _runnable(precision: str | None, device: torch.device) -> str | None:
    """What is asked for, or nothing where a GPU can't do it, which is said once."""
    if precision is None or device.type != "cuda":
        return precision
    found, least = torch.cuda.get_device_capability(device), _LEAST[precision]
    if found >= least and fused.HAS_TRITON:
        return precision
    lack = "there is no Triton" if found >= least else f"it has compute capability {found[0]}.{found[1]}"
    _say(
        f"model.precision: {precision} needs a GPU of compute capability {least[0]}.{least[1]} and Triton, and "
        f"{torch.cuda.get_device_name(device)} can't do it ({lack}): model.dtype is used instead"
    )
    return None


@functools.cache
def _say(line: str) -> None:
    logger.warning(line)


def compute_in_eight_bits(blocks: Iterable[Any], precision: str, device: torch.device | None = None) -> None:
    """Let the frozen linear layers of blocks compute in 8 bits; those that make modulation are only kept in them.

    Adapters must have been added already: PEFT would give theirs the dtype of the weight. Each layer is rounded on
    `device`, and stays where it is.
    """
    for block in blocks:
        gates = {id(module) for name in block.unread.gates for module in block.get_submodule(name).modules()}
        for name, layer in block.named_modules():
            if not isinstance(layer, nn.Linear) or is_eight_bit(layer) or ".lora_" in name:
                continue
            if id(layer) in gates:
                EightBitWeight.convert(layer, device)
            else:
                EightBitLinear.convert(layer, EIGHT_BITS[precision], device)


_BYTES = {"nf4": 0.5625, "int8": 1.0, "fp8": 1.0}
"""Of a weight, with its share of a scale."""


def weight_bytes(module: nn.Module, quantization: str | None = None) -> int:
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
