"""Adapters through PEFT: inject them, keep them in float32."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig
from peft.tuners.loha.layer import Linear as LoHaLinear
from peft.tuners.lokr.layer import Linear as LoKrLinear
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer as PeftLoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from torch import Tensor, nn

from qflux.adapters.layers import FOREIGN, LoraLayer, LoraLayers
from qflux.config import LoraSettings
from qflux.errors import CheckpointError, ConfigError
from qflux.ragged.eightbit.linear import is_eight_bit
from qflux.ragged.fused.adapted import adapted_product
from qflux.ragged.recomputed.unread import LastLinear

ADAPTER = "default"
KINDS: dict[str, type[PeftConfig]] = {"LORA": LoraConfig, "LOKR": LoKrConfig, "LOHA": LoHaConfig}


class Float32Linear(nn.Linear):
    """A linear layer whose float32 weight computes in its input's dtype.

    Adapter weights must stay float32, or small updates round to nothing; their matrix products need not. PEFT's own
    answer casts the activations up instead, which on large batches costs more than the adapter itself.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class LoRALinear(PeftLinear):
    """A linear layer and its LoRA, as one product where that can be; elsewhere it computes as PEFT does."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        if args or options or not self._is_plain(x):
            out: Tensor = super().forward(x, *args, **options)
            return out
        return self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def of_two(self, first: Tensor, second: Tensor) -> Tensor:
        """`self(cat([first, second]))`: one product over the channels of two tensors, `(T, I1)` and `(T, I2)`."""
        if _is_watched(self) or not self._is_plain(first, or_disabled=True):
            return self(torch.cat([first, second], dim=1))
        # Rounded between the two without the LoRA as well: one that adds nothing changes nothing.
        return self._product(first, second)

    def _product(self, *parts: Tensor) -> Tensor:
        base, (name,) = self.base_layer, self.active_adapters
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        strength = 0.0 if self.disable_adapters else self.scaling[name]
        return adapted_product(parts, base.weight, base.bias, down, up, strength, isinstance(base, LastLinear))

    def _is_plain(self, x: Tensor, or_disabled: bool = False) -> bool:
        """Whether there is one LoRA, nothing but a LoRA, on a frozen layer that is nothing but a product."""
        if (self.disable_adapters and not or_disabled) or self.merged or len(self.active_adapters) != 1:
            return False
        base, (name,) = self.base_layer, self.active_adapters
        if name not in self.lora_A or name in self.lora_variant or not isinstance(self.lora_dropout[name], nn.Identity):
            return False
        down, up = self.lora_A[name], self.lora_B[name]
        in_float32 = self.cast_input_dtype_enabled and down.weight.dtype != x.dtype
        return (
            type(base) in (nn.Linear, LastLinear)
            and type(base.weight) is nn.Parameter
            and not base.weight.requires_grad
            and (base.bias is None or not base.bias.requires_grad)
            and base.weight.dtype == x.dtype
            and not (in_float32 or _is_under_autocast(x.device))
            and down.bias is None
            and up.bias is None
            and not any(map(_is_watched, (base, down, up)))
        )


def _is_watched(layer: nn.Module) -> bool:
    """Whether somebody wants to know when it runs, or has put something before it: offloading does."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in layer.__dict__


def _is_under_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


class _InBaseDtype:
    """LoKr and LoHa make a whole weight from float32 factors; it is multiplied in the base's dtype."""

    def get_delta_weight(self, *args: Any, **options: Any) -> Tensor:
        weight: Tensor = super().get_delta_weight(*args, **options)  # type: ignore[misc]
        base = self.get_base_layer()  # type: ignore[attr-defined]
        return weight.to(base.computes_in if is_eight_bit(base) else base.weight.dtype)


class _LoKrLinear(_InBaseDtype, LoKrLinear): ...


class _LoHaLinear(_InBaseDtype, LoHaLinear): ...


_QUICK: dict[type[nn.Module], type[nn.Module]] = {
    PeftLinear: LoRALinear,
    LoKrLinear: _LoKrLinear,
    LoHaLinear: _LoHaLinear,
}


def inject(
    transformer: nn.Module, settings: LoraSettings, targets: Sequence[str], seed: int, is_whole: bool = True
) -> None:
    """Add a trainable float32 adapter to `targets` of a transformer, and freeze everything else.

    Equal seeds give equal weights. If the transformer is not whole, patterns need not match any of its layers.
    """
    transformer.requires_grad_(False)
    _require_targets(transformer, targets)
    config, exclude = _config(settings, list(targets)), containers(transformer, targets)
    if settings.patterns:
        assert isinstance(config, LoraConfig)
        ranks = _ranks(transformer, settings, targets, exclude, is_whole)
        config, exclude = dataclasses.replace(config, **_own(ranks, config.r, config.lora_alpha)), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        add(transformer, config, exclude=exclude)
    keep_float32(transformer)


def _ranks(
    transformer: nn.Module, settings: LoraSettings, targets: Sequence[str], exclude: Sequence[str], is_whole: bool
) -> dict[str, tuple[int, float]]:
    """Rank and alpha of every layer that trains: those of the targets, then what patterns say, one after another."""
    names = [name for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)]
    chosen = [name for name in names if name not in exclude and any(_ends(name, target) for target in targets)]
    found = {name: (settings.rank, settings.alpha or float(settings.rank)) for name in chosen}
    for pattern in settings.patterns:
        matched = [name for name in names if re.search(pattern.match, name)]
        if not matched and is_whole:
            raise ConfigError(
                f"lora.patterns: no layer of {type(transformer).__name__} matches {pattern.match!r}",
                "layers are called as in the model, for example transformer_blocks.0.attn.to_q.",
            )
        for name in matched:
            if pattern.rank == 0:
                found.pop(name, None)
            else:
                rank = pattern.rank or settings.rank
                found[name] = rank, pattern.alpha or settings.alpha or float(rank)
    if not found and is_whole:
        raise ConfigError("lora.patterns leave no layer to train", "give some of them a rank above 0.")
    return found or {name: (settings.rank, float(settings.rank)) for name in chosen[:1]}


def _own(ranks: Mapping[str, tuple[int, float]], rank: int, alpha: float) -> dict[str, Any]:
    """PEFT's settings for layers by name, with a rank and an alpha of each: patterns where they are not the common."""
    return {
        "target_modules": "^(" + "|".join(map(re.escape, ranks)) + ")$",
        "rank_pattern": {f"^{re.escape(name)}$": own for name, (own, _) in ranks.items() if own != rank},
        "alpha_pattern": {f"^{re.escape(name)}$": own for name, (_, own) in ranks.items() if own != alpha},
    }


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def keep_float32(transformer: nn.Module) -> None:
    """Adapter weights in float32, LoRA's computing in the dtype of their input."""
    for layer in transformer.modules():
        if isinstance(layer, PeftLoraLayer):
            layer.cast_input_dtype_enabled = False
            for linear in (*layer.lora_A.values(), *layer.lora_B.values()):
                linear.__class__ = Float32Linear
    for parameter in trainable(transformer).values():
        parameter.data = parameter.data.float()


def add(transformer: nn.Module, config: PeftConfig, name: str = ADAPTER, exclude: Sequence[str] = ()) -> None:
    """Add an adapter; what it can't be added to is the config's fault."""
    if exclude:
        config.exclude_modules = list(exclude)
    try:
        transformer.add_adapter(config, adapter_name=name)  # type: ignore[operator]
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: {error}", _NAMES) from error
    for layer in transformer.modules():
        layer.__class__ = _QUICK.get(type(layer), type(layer))


def config_from(description: Mapping[str, Any]) -> PeftConfig:
    """The PEFT config that an adapter file describes; what this version of PEFT does not know is left out."""
    kind = KINDS[str(description.get("peft_type", "LORA")).rpartition(".")[2]]
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{key: value for key, value in description.items() if key in known and key != "peft_type"})


def lora_config(layers: Mapping[str, LoraLayer]) -> LoraConfig:
    """PEFT's settings for a LoRA: the commonest rank and alpha, and patterns for layers that have others."""
    rank = Counter(layer.rank for layer in layers.values()).most_common(1)[0][0]
    alpha = Counter(layer.alpha for layer in layers.values()).most_common(1)[0][0]
    is_dora = {layer.magnitude is not None for layer in layers.values()}
    if len(is_dora) > 1:
        raise CheckpointError("some layers have DoRA magnitudes and some have none", FOREIGN)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        **_own({name: (layer.rank, layer.alpha) for name, layer in layers.items()}, rank, alpha),
        use_dora=is_dora == {True},
    )


@contextmanager
def without_adapter(transformer: nn.Module) -> Iterator[None]:
    """Inside, the transformer computes what it did before it had an adapter; nothing else of the adapter changes."""
    layers = [layer for layer in transformer.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def trainable(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name, in a stable order."""
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}


def trained_layers(transformer: Any, tensors: Mapping[str, Tensor]) -> LoraLayers:
    """The LoRA under training, from its tensors under PEFT's names."""
    scales = {n: m.lora_alpha[ADAPTER] for n, m in transformer.named_modules() if isinstance(m, PeftLoraLayer)}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(".lora_")
        parts.setdefault(name, {})[part.partition(".")[0]] = tensor
    return {
        name: LoraLayer(found["A"], found["B"], float(scales[name]), found.get("magnitude_vector"))
        for name, found in parts.items()
    }


def adapter_tensors(transformer: nn.Module) -> dict[str, Tensor]:
    """The tensors of the adapter under training, under PEFT's names; shared out if the transformer is."""
    return dict(get_peft_model_state_dict(transformer, adapter_name=ADAPTER))


def _config(settings: LoraSettings, targets: list[str]) -> PeftConfig:
    alpha = settings.alpha if settings.alpha is not None else settings.rank
    if settings.type in ("lora", "dora"):
        return LoraConfig(
            r=settings.rank,
            lora_alpha=alpha,
            lora_dropout=settings.dropout,
            target_modules=targets,
            init_lora_weights="gaussian" if settings.init == "gaussian" else True,
            use_dora=settings.type == "dora",
        )
    kind = LoKrConfig if settings.type == "lokr" else LoHaConfig
    return kind(r=settings.rank, alpha=alpha, rank_dropout=settings.dropout, target_modules=targets)


def _require_targets(transformer: nn.Module, targets: Sequence[str]) -> None:
    names = [name for name, _ in transformer.named_modules()]
    unknown = [target for target in targets if not any(_ends(name, target) for name in names)]
    if unknown:
        raise ConfigError(f"lora.target_modules: {type(transformer).__name__} has no {', '.join(unknown)}", _NAMES)


def containers(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """What ends like a target and is no layer: `to_out` may be a layer in one kind of block, a list in another."""
    kinds = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    found = [name for name, module in transformer.named_modules() if isinstance(module, kinds)]
    return [name for name in found if any(name.endswith(f".{target}") for target in targets)]


_NAMES = "use names as they end in the model, for example [to_q, to_k, to_v, to_out.0]."
