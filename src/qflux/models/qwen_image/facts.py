"""Qwen-Image, Qwen-Image-Edit and Qwen-Image-Edit-Plus in numbers and names."""

from __future__ import annotations

from dataclasses import replace

from qflux.models.facts import Facts

MOST_IMAGES = 4096
"""How far diffusers' table of rotary positions reaches: images of a sample, half-sides and text together."""

_IMAGE = Facts(
    name="qwen-image",
    title="Qwen-Image",
    hub_id="Qwen/Qwen-Image",
    pipeline="QwenImagePipeline",
    transformer="QwenImageTransformer2DModel",
    trainer="QwenImageTrainer",
    gigabytes=40.9,
    compiled_activations=0.61,
    compiled_around=1.66,
    width=3072,
    controls=(0, 0),
    text_channels=3584,
    image_channels=64,
    max_sequence_length=1024,
    num_inference_steps=50,
    true_cfg_scale=4.0,
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
    spellings=(r"qwen-image(?!-edit)",),
)
_EDIT = replace(
    _IMAGE,
    name="qwen-image-edit",
    title="Qwen-Image-Edit",
    hub_id="Qwen/Qwen-Image-Edit",
    pipeline="QwenImageEditPipeline",
    trainer="QwenImageEditTrainer",
    controls=(1, MOST_IMAGES - 1),
    spellings=("qwen-image-edit$",),
    original_trainer="QwenImageEdit",
)
_EDIT_2511 = replace(
    _EDIT,
    name="qwen-image-edit-plus",
    title="Qwen-Image-Edit-2511",
    hub_id="Qwen/Qwen-Image-Edit-2511",
    pipeline="QwenImageEditPlusPipeline",
    trainer="QwenImageEditPlusTrainer",
    controls=(0, MOST_IMAGES - 1),
    spellings=("qwen-image-edit.",),
    original_trainer="QwenImageEditPlus",
)
_EDIT_2509 = replace(_EDIT_2511, title="Qwen-Image-Edit-2509", hub_id="Qwen/Qwen-Image-Edit-2509")
_EDIT_PLUS = replace(_EDIT_2511, variants=(_EDIT_2509,))
FACTS = {facts.name: facts for facts in (_IMAGE, _EDIT, _EDIT_PLUS)}
