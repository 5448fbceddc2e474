"""An optimizer's state as named tensors and plain values, and back: no pickle, and every bit as it was.

A name is the path to its value, `<number of the parameter>/<key>`, or longer where a value is nested.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qflux.errors import CheckpointError
from qflux.training.distributed import like

SEPARATOR = "/"


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and everything else as JSON can hold it."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    for path, value in _leaves(state["state"]):
        name = SEPARATOR.join(path)
        if isinstance(value, DTensor) and value.shape != parameters[int(path[0])].shape:
            raise CheckpointError(
                f"the optimizer's {name} is shared out in another shape than its parameter, which can't be saved",
                "use train.distributed: ddp, or another optimizer.",
            )
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not isinstance(value, DTensor):
            inner, context = value.__tensor_flatten__()
            kinds[name] = [type(value).__module__, type(value).__qualname__, list(inner), _listed(name, context)]
            tensors |= {f"{name}{SEPARATOR}{part}": getattr(value, part) for part in inner}
        elif isinstance(value, Tensor):
            tensors[name] = value
        elif is_plain(value):
            values[name] = value
        else:
            raise _unsavable(name, value)
    return tensors, {"values": values, "kinds": kinds, "param_groups": [_group(g) for g in state["param_groups"]]}


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    tensors: Iterable[tuple[str, Tensor]],
    scalars: dict[str, Any],
) -> None:
    """The inverse. What has the shape of its parameter is shared out as that is."""
    state: dict[int, dict[str, Any]] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    inside = {f"{name}{SEPARATOR}{part}": (name, part) for name, kind in scalars["kinds"].items() for part in kind[2]}
    for name, tensor in tensors:
        parameter = parameters[int(name.split(SEPARATOR)[0])]
        if name in inside:
            outer, part = inside[name]
            parts.setdefault(outer, {})[part] = tensor.to(parameter.device)
        else:
            _put(state, name, like(tensor, parameter) if tensor.shape == parameter.shape else tensor)
    for name, (module, kind, _, context) in scalars["kinds"].items():
        rebuild = getattr(_class_of(module, kind, optimizer), "__tensor_unflatten__")  # noqa: B009
        _put(state, name, rebuild(parts[name], _unlisted(context), None, None))
    for name, value in scalars["values"].items():
        _put(state, name, value)
    groups = [
        {**_fixed(own), **saved} for own, saved in zip(optimizer.param_groups, scalars["param_groups"], strict=True)
    ]
    tensor_settings = [{key: v for key, v in g.items() if isinstance(v, Tensor)} for g in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for group, kept in zip(optimizer.param_groups, tensor_settings, strict=True):
        for key, tensor in kept.items():
            group[key] = tensor.fill_(float(group[key]))
    _put_back(optimizer, parameters, state)


def _put_back(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], saved: dict[int, Any]) -> None:
    """torch casts state to the parameter's dtype when it loads it; what was kept in another one is set again."""
    for index, values in saved.items():
        held = optimizer.state[parameters[index]]
        for name, value in values.items():
            now = held.get(name)
            if (
                isinstance(value, Tensor)
                and isinstance(now, Tensor)
                and (now.dtype, type(now)) != (value.dtype, type(value))
            ):
                held[name] = value.to(now.device)


def _put(state: dict[int, dict[str, Any]], name: str, value: Any) -> None:
    index, *path, last = name.split(SEPARATOR)
    place = state.setdefault(int(index), {})
    for part in path:
        place = place.setdefault(part, {})
    place[last] = value


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, (*path, str(key)))


def _class_of(module: str, name: str, optimizer: torch.optim.Optimizer) -> Any:
    """Only from the optimizer's own package: a checkpoint must not decide what is imported."""
    package = type(optimizer).__module__.partition(".")[0]
    if module.partition(".")[0] != package:
        raise CheckpointError(f"the checkpoint's optimizer state is a {module}.{name}, the optimizer is from {package}")
    return getattr(importlib.import_module(module), name)


def _group(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group; settings that are tensors of one value become numbers."""
    plainer = {k: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()}
    return {key: plain(value) for key, value in plainer.items() if is_plain(value)}


def _fixed(group: dict[str, Any]) -> dict[str, Any]:
    """What JSON can't hold, and the constructor has set."""
    return {key: value for key, value in group.items() if key != "params" and not is_plain(value)}


def _listed(name: str, context: Any) -> Any:
    """The context of a tensor subclass; of what JSON can't hold it may have dtypes."""
    if isinstance(context, list | tuple):
        return [_listed(name, item) for item in context]
    if isinstance(context, torch.dtype):
        return {"dtype": str(context).removeprefix("torch.")}
    if not is_plain(context):
        raise _unsavable(name, context)
    return context


def _unlisted(context: Any) -> Any:
    if isinstance(context, list):
        return [_unlisted(item) for item in context]
    return getattr(torch, context["dtype"]) if isinstance(context, dict) and "dtype" in context else context


def _unsavable(name: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"the optimizer keeps a {type(value).__name__} ({name}), which can't be saved without pickle",
        "choose another optimizer.",
    )


def plain(value: Any) -> Any:
    """Values as JSON has them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if is_plain(item)}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | dict)
