"""Qwen-Image-2.1 in numbers and names."""

from __future__ import annotations

from qflux.models.facts import Facts

MOST_POSITIONS, MOST_ROWS = 8192, 2048
"""How far diffusers' table of rotary positions reaches: along the text and the images in it, and across one image."""

FACTS = {
    "qwen-image-2.1": Facts(
        name="qwen-image-2.1",
        title="Qwen-Image-2.1",
        hub_id="Qwen/Qwen-Image-2.1",
        pipeline="QwenImage21Pipeline",
        transformer="QwenImage21Transformer2DModel",
        trainer="QwenImage21Trainer",
        gigabytes=14.4,
        compiled_activations=0.612,
        compiled_around=1.63,
        width=4096,
        controls=(0, 10),
        text_channels=4096,
        image_channels=64,
        max_sequence_length=4096,
        num_inference_steps=40,
        true_cfg_scale=1.0,
        size_multiple=32,
        shares_prefix=True,
        has_alpha=True,
        lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
        spellings=(r"qwen-image-2\.?1.*",),
    )
}
