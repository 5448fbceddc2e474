"""The parts of a Qwen-Image checkpoint, under the names its diffusers pipelines use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class QwenImageComponents:
    """A part that is not needed is `None`. `processor` exists for the families whose text encoder sees images."""

    transformer: Any = None
    vae: Any = None
    scheduler: Any = None
    text_encoder: Any = None
    tokenizer: Any = None
    processor: Any = None
