"""The parts of a FLUX Kontext checkpoint, under the names its diffusers pipeline uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
