"""FLUX.2's layers under the names its authors published them with."""

from __future__ import annotations

import re
from collections.abc import Iterable

_DOUBLE = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.linear_in",),
    "img_mlp.2": ("ff.linear_out",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.linear_in",),
    "txt_mlp.2": ("ff_context.linear_out",),
}
_SINGLE = {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}
_TOP = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
    "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
SWAPPED = frozenset({"final_layer.adaLN_modulation.1"})
"""Its outputs are shift and scale; diffusers' `norm_out.linear` gives scale and shift."""
_KINDS = (("double_blocks", "transformer_blocks", _DOUBLE), ("single_blocks", "single_transformer_blocks", _SINGLE))


def original_names(layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The original name of each layer, and the layers of diffusers that it consists of, for a model with these."""
    known = set(layers)
    names: dict[str, tuple[str, ...]] = {original: parts for original, parts in _TOP.items() if parts[0] in known}
    for theirs, ours, parts in _KINDS:
        numbers = {int(found[1]) for name in known if (found := re.match(rf"{ours}\.(\d+)\.", name))}
        for number in sorted(numbers):
            for original, members in parts.items():
                names[f"{theirs}.{number}.{original}"] = tuple(f"{ours}.{number}.{member}" for member in members)
    return names
