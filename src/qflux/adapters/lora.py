"""LoRA through PEFT: inject, keep in float32, save and load in diffusers' format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qflux.config import LoraSettings
from qflux.errors import ConfigError

ADAPTER = "default"


class Float32Linear(nn.Linear):
    """A linear layer whose float32 weight computes in its input's dtype.

    Adapter weights must stay float32, or small updates round to nothing; their matrix products need not. PEFT's own
    answer casts the activations up instead, which on large batches costs more than the adapter itself.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


def inject(transformer: nn.Module, settings: LoraSettings, seed: int) -> None:
    """Add a trainable float32 LoRA to `transformer`; freeze everything else. Equal seeds give equal weights."""
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _add(transformer, settings)
    for layer in lora_layers(transformer):
        layer.cast_input_dtype_enabled = False
        for part in (layer.lora_A, layer.lora_B):
            for linear in part.values():
                linear.__class__ = Float32Linear
                linear.to(torch.float32)


def _add(transformer: nn.Module, settings: LoraSettings) -> None:
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha if settings.alpha is not None else settings.rank,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules),
        init_lora_weights="gaussian" if settings.init == "gaussian" else True,
    )
    names = [name for name, _ in transformer.named_modules()]
    unknown = [t for t in settings.target_modules if not any(n == t or n.endswith(f".{t}") for n in names)]
    remedy = "use names as they end in the model, for example [to_q, to_k, to_v, to_out.0]."
    if unknown:
        raise ConfigError(f"lora.target_modules: {type(transformer).__name__} has no {', '.join(unknown)}", remedy)
    try:
        transformer.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: {error}", remedy) from error


def lora_layers(transformer: nn.Module) -> Iterator[Any]:
    for module in transformer.modules():
        if isinstance(module, LoraLayer):
            yield module


def trainable(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name, in a stable order."""
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}
