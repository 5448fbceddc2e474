"""FLUX.2 in numbers and names: klein with 4 and 9 billion weights, base and distilled, and dev."""

from __future__ import annotations

from dataclasses import replace

from qflux.models.facts import Facts

_BASE_9B = Facts(
    name="flux2",
    title="FLUX.2 klein base 9B",
    hub_id="black-forest-labs/FLUX.2-klein-base-9B",
    pipeline="Flux2KleinPipeline",
    transformer="Flux2Transformer2DModel",
    trainer="Flux2LoraTrainer",
    gigabytes=18.2,
    compiled_activations=0.775,
    compiled_around=1.93,
    width=4096,
    controls=(0, None),
    text_channels=12288,
    image_channels=128,
    max_sequence_length=512,
    num_inference_steps=50,
    true_cfg_scale=4.0,
    negative_prompt="",
    text_projection="context_embedder",
    embeds_guidance=False,
    refused={"Flux2KleinKVPipeline": "its controls see only themselves, as if they had no noise"},
    # Without the single-stream blocks' two layers, most of the model, a LoRA learns little but smooth pictures.
    lora_targets=("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj", "attn.to_out"),
    spellings=(r"flux[._-]?2(?![0-9]).*",),
)
_BASE_4B = replace(
    _BASE_9B,
    title="FLUX.2 klein base 4B",
    hub_id="black-forest-labs/FLUX.2-klein-base-4B",
    gigabytes=7.8,
    width=3072,
    text_channels=7680,
)


def _distilled(base: Facts) -> Facts:
    title, hub_id = (text.replace("base", "").replace("--", "-") for text in (base.title, base.hub_id))
    return replace(
        base,
        title=title.replace("  ", " "),
        hub_id=hub_id,
        num_inference_steps=4,
        true_cfg_scale=1.0,
        negative_prompt=None,
        distilled_from=base.hub_id,
    )


_DEV = replace(
    _BASE_9B,
    title="FLUX.2 dev",
    hub_id="black-forest-labs/FLUX.2-dev",
    pipeline="Flux2Pipeline",
    gigabytes=64.4,
    width=6144,
    text_channels=15360,
    true_cfg_scale=1.0,
    negative_prompt=None,
    guidance_scale=4.0,
    embeds_guidance=True,
)
FACTS = {"flux2": replace(_BASE_9B, variants=(_BASE_4B, _distilled(_BASE_9B), _distilled(_BASE_4B), _DEV))}
