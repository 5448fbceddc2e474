"""The small model that comes with qflux: a FLUX Kontext of 9 million weights.

`scripts/train_demo_base.py` trains it on the instructions of the demo; the result lies in `demo/model`, in half
precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qflux.models.flux_kontext.components import FluxKontextComponents
from qflux.models.flux_kontext.tiny import Sizes, small

SIZES = Sizes(
    layers=(2, 7),
    heads=6,
    head_axes=(4, 14, 14),
    text=(128, 32, 256),
    pooled=(96, 4, 192),
    vae=(24, 48, 72, 96),
    vae_groups=8,
    vae_attention=False,  # squares of a picture can then stand for all of it in training
)


def untrained(seed: int, words: Sequence[str]) -> FluxKontextComponents:
    """All components in float32 on the CPU; equal seeds give equal weights. Of these words each is a token."""
    parts = small(replace(SIZES, words=tuple(words)), seed)
    # Blocks start as the identity, and the output as zero: deep transformers of this kind train faster so.
    for name, module in parts.transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and (".norm" in name or name in ("norm_out.linear", "proj_out")):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    parts.vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    return parts
