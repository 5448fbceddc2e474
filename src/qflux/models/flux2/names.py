"""FLUX.2's layers under the names its authors published them with."""

from __future__ import annotations

from qflux.models.original_names import names_of_blocks

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
original_names = names_of_blocks(_TOP, _DOUBLE, _SINGLE)
