"""What lets a ragged transformer stand in for diffusers' own: its tools know our blocks, older calls are understood."""

from __future__ import annotations

import copy
import copyreg
import importlib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor, nn


def register_blocks(*blocks: type[nn.Module]) -> None:
    """Tell diffusers' caches and layer skipping about block classes: what they know of the class each one extends."""
    for block in blocks:
        known = copy.copy(TransformerBlockRegistry.get(block.__mro__[1]))
        known._cached_parameter_indices = None
        TransformerBlockRegistry.register(block, known)


def picklable(reduced: tuple[Any, ...], module: str) -> tuple[Any, ...]:
    """What `__reduce_ex__` gives, for a class of `module` that goes by the name of another module."""
    make, arguments, *rest = reduced
    own = getattr(sys.modules[module], arguments[0].__qualname__, None) if arguments else None
    if make is not copyreg.__newobj__ or own is not arguments[0]:  # type: ignore[attr-defined]  # a class that FSDP made of it
        return reduced
    return blank, (module, own.__qualname__), *rest


def blank(module: str, name: str) -> Any:
    """An object of a class, not yet filled."""
    kind = getattr(importlib.import_module(module), name)
    return kind.__new__(kind)


def require_plain_attention(blocks: Iterable[nn.Module], processor: type[Any]) -> None:
    """An error if attention was replaced: ragged blocks compute their own, and would leave the replacement out."""
    for block in blocks:
        found: Any = block.attn.processor  # type: ignore[union-attr]
        if type(found) is not processor:
            raise ValueError(
                f"the attention processor {type(found).__name__} is not used for samples of different sizes: "
                "run them one by one, or set the default processor."
            )
        backend = getattr(found, "_attention_backend", None)
        if backend not in (None, AttentionBackendName.NATIVE):
            raise ValueError(
                f"the attention backend {backend} is not used for samples of different sizes: run them one by one, "
                "or call reset_attention_backend()."
            )


def take_mask(
    name: str, options: dict[str, Any] | None, mask: Tensor | None
) -> tuple[dict[str, Any] | None, Tensor | None]:
    """`attention_mask` out of attention kwargs, where older calls put it: 1 for valid tokens, or added to scores."""
    if not options or "attention_mask" not in options:
        return options, mask
    rest = {key: value for key, value in options.items() if key != "attention_mask"}
    found = options["attention_mask"]
    if found is None:
        return rest, mask
    if mask is not None:
        raise ValueError(f"attention_mask is given twice: as an argument and in {name}.")
    _deprecated(f'{name}={{"attention_mask": …}}', "attention_mask=…")
    return rest, _from_additive(found)


def mask_from_lengths(lengths: Iterable[int] | Tensor | None, text: Tensor, mask: Tensor | None) -> Tensor | None:
    """The text mask `(B, P)`; `txt_seq_lens` of older calls stand for one, if there is none."""
    if lengths is None:
        return mask
    _deprecated("txt_seq_lens", "encoder_hidden_states_mask")
    if mask is not None:
        return mask
    counts = torch.as_tensor(lengths, device=text.device)
    if counts.shape != (len(text),) or int(counts.max()) > text.shape[1]:
        raise ValueError(
            f"txt_seq_lens {counts.tolist()} do not fit encoder_hidden_states of shape {tuple(text.shape)}."
        )
    return torch.arange(text.shape[1], device=text.device)[None] < counts[:, None]


def _from_additive(mask: Tensor) -> Tensor:
    """0 where a token is valid and very negative where it is not, as true and false; other masks as they are."""
    if mask.dtype == torch.bool or bool((mask > 0).any()):
        return mask
    if not bool(((mask == 0) | (mask < -1e3)).all()):
        raise ValueError("an additive attention_mask must hold 0 for valid tokens and -inf for padding.")
    return mask == 0


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"{old} is understood, but deprecated: pass {new}", FutureWarning, stacklevel=5)
