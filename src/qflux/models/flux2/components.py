"""The parts of a FLUX.2 checkpoint, under the names its diffusers pipelines use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Flux2Components:
    """A part that is not needed is `None`. klein reads prompts with Qwen3 and its tokenizer, dev with Mistral 3 and a
    processor, which its pipeline calls the tokenizer too."""

    transformer: Any = None
    vae: Any = None
    scheduler: Any = None
    text_encoder: Any = None
    tokenizer: Any = None
