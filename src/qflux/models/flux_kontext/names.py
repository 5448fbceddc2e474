"""FLUX's layers under the names its authors published them with.

Query, key and value are one layer there, and in single-stream blocks the first layer of the MLP is part of it too.
"""

from __future__ import annotations

from qflux.models.original_names import names_of_blocks

_DOUBLE = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
}
_SINGLE = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
}
_TOP = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
SWAPPED = frozenset({"final_layer.adaLN_modulation.1"})
"""Its outputs are shift and scale; diffusers' `norm_out.linear` gives scale and shift."""
original_names = names_of_blocks(_TOP, _DOUBLE, _SINGLE)
