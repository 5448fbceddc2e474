"""The parts of a FLUX.3 checkpoint, under the names its diffusers pipeline uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Flux3Components:
    """A part that is not needed is `None`. What the pipeline calls its tokenizer is a processor of text and images;
    prompts hold no images, so the tokenizer in it is all that is loaded."""

    transformer: Any = None
    vae: Any = None
    scheduler: Any = None
    text_encoder: Any = None
    tokenizer: Any = None
