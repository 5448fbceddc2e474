"""FLUX.3's layers under the names its authors published them with."""

from __future__ import annotations

from collections.abc import Iterable

_ENDS = {
    "attn.to_q": "q_proj",
    "attn.to_k": "k_proj",
    "attn.to_v": "v_proj",
    "attn.to_out.0": "attn_out",
    "ff.linear_in": "mlp_in",
    "ff.linear_out": "mlp_out",
}
"""Layers of a block."""
_STARTS = {
    "mode_blocks.": "content_mode_blocks.",
    "txt_mode_blocks.": "txt_mode_blocks.",
    "single_transformer_blocks.": "single_blocks.",
}


def original_names(layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The original name of each layer of a block. diffusers reads no other names from LoRA files."""
    names: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        start = next((start for start in _STARTS if layer.startswith(start)), None)
        end = next((end for end in _ENDS if layer.endswith(f".{end}")), None)
        if start and end:
            names[_STARTS[start] + layer.removeprefix(start).removesuffix(end) + _ENDS[end]] = (layer,)
    return names
