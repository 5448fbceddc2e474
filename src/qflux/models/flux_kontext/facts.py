"""FLUX.1 Kontext in numbers and names."""

from __future__ import annotations

from pathlib import Path

from qflux.models.facts import Facts, Shipped, Size

KONTEXT_SIZES: tuple[Size, ...] = tuple(
    (height, width)
    for width, height in (
        (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
        (1024, 1024),
        (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688), (1568, 672),
    )
)  # fmt: skip
"""What Kontext was trained on, and what its pipeline brings images to."""

SMALL = Shipped(
    name="qflux-small",
    family="flux-kontext",
    folder=Path(__file__).parents[2] / "demo" / "model",
    text_tokens=24,
    learning_rate=0.006,
    lora_targets=(
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "net.0.proj",
        "net.2",
        "proj_mlp",
        "proj_out",
        "norm.linear",
        "norm1.linear",
    ),
)
"""A FLUX Kontext of 9 million weights (see `small`)."""

FACTS = {
    "flux-kontext": Facts(
        name="flux-kontext",
        title="FLUX.1 Kontext",
        hub_id="black-forest-labs/FLUX.1-Kontext-dev",
        pipeline="FluxKontextPipeline",
        transformer="FluxTransformer2DModel",
        trainer="FluxKontextLoraTrainer",
        gigabytes=23.8,
        compiled_activations=0.824,
        compiled_around=1.0,
        width=3072,
        controls=(0, None),
        text_channels=4096,
        image_channels=64,
        max_sequence_length=512,
        has_second_prompt=True,
        num_inference_steps=28,
        true_cfg_scale=1.0,
        lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
        spellings=("kontext",),
        original_trainer="FluxKontext",
        size_presets={"kontext": KONTEXT_SIZES},
        shipped=SMALL,
    )
}
