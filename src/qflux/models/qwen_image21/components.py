"""The parts of a Qwen-Image-2.1 checkpoint, under the names its diffusers pipeline uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class QwenImage21Components:
    """A part that is not needed is `None`. The tokenizer is in the processor."""

    transformer: Any = None
    vae: Any = None
    scheduler: Any = None
    text_encoder: Any = None
    processor: Any = None
