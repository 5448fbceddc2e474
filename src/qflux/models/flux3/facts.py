"""FLUX.3 klein in numbers and names: base and distilled."""

from __future__ import annotations

from dataclasses import replace

from qflux.models.facts import Facts

_BASE = Facts(
    name="flux3",
    title="FLUX.3 klein base",
    hub_id="black-forest-labs/flux-3-image-klein-base",
    pipeline="Flux3ModularPipeline",
    transformer="Flux3Transformer2DModel",
    trainer="Flux3LoraTrainer",
    gigabytes=11.2,
    compiled_activations=0.748,
    compiled_around=0.89,
    width=3072,
    controls=(0, 10),
    text_channels=20480,
    image_channels=128,
    max_sequence_length=8192,
    num_inference_steps=50,
    true_cfg_scale=3.5,
    negative_prompt="",
    text_projection="context_embedder",
    lora_targets=("to_q", "to_k", "to_v", "to_out.0", "ff.linear_in", "ff.linear_out"),
    spellings=(r"flux[._-]?3(?![0-9]).*",),
)
_DISTILLED = replace(
    _BASE,
    title="FLUX.3 klein",
    hub_id="black-forest-labs/flux-3-image-klein",
    pipeline="Flux3DistilledModularPipeline",
    num_inference_steps=16,
    true_cfg_scale=1.0,
    negative_prompt=None,
    distilled_from=_BASE.hub_id,
)
FACTS = {"flux3": replace(_BASE, variants=(_DISTILLED,))}
