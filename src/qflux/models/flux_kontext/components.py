"""The parts of a FLUX Kontext checkpoint, under the names its diffusers pipeline uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch


@dataclass
class FluxKontextComponents:
    """A part that is not needed is `None`: training loads no encoder, caching no transformer."""

    transformer: Any = None
    vae: Any = None
    scheduler: Any = None
    text_encoder: Any = None
    tokenizer: Any = None
    text_encoder_2: Any = None
    tokenizer_2: Any = None


def save_checkpoint(components: FluxKontextComponents, folder: Path) -> None:
    """Write a checkpoint that diffusers' own `FluxKontextPipeline` loads."""
    # Saved as diffusers' class, or the checkpoint would name qflux as the only library that can load it.
    with torch.device("meta"):
        stock = diffusers.FluxTransformer2DModel.from_config(components.transformer.config)
    stock.load_state_dict(components.transformer.state_dict(), assign=True)
    parts = {name: value for name, value in vars(components).items() if name != "transformer"}
    diffusers.FluxKontextPipeline(transformer=stock, **parts).save_pretrained(folder)
