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
_TOP = {
    "x_embedders.image": "emb_in.image",
    "x_embedders.image_cond": "emb_in.image_cond",
    "context_embedder": "txt_in",
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "target_timestep_embedder.linear_1": "ref_time_in.in_layer",
    "target_timestep_embedder.linear_2": "ref_time_in.out_layer",
    "proj_out": "final_layer.image.linear",
    "norm_out.linear": "final_layer.image.adaLN_modulation.1",
}
SWAPPED = frozenset({"final_layer.image.adaLN_modulation.1"})
"""Its outputs are shift and scale; diffusers' `norm_out.linear` gives scale and shift."""


def original_names(layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The original name of each layer. Of LoRA files, diffusers reads those of blocks only."""
    return {original: (layer,) for layer in layers if (original := _original(layer))}


def _original(layer: str) -> str | None:
    if layer in _TOP:
        return _TOP[layer]
    if layer.startswith(("early_stream_modulations.", "single_stream_modulations.")):
        return layer.removesuffix("linear") + "lin"
    start = next((start for start in _STARTS if layer.startswith(start)), None)
    end = next((end for end in _ENDS if layer.endswith(f".{end}")), None)
    return _STARTS[start] + layer.removeprefix(start).removesuffix(end) + _ENDS[end] if start and end else None
