"""Compile blocks once for all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as shape_config
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
    """`torch.compile` each block with dynamic shapes; blocks of one class share their code.

    By default torch takes two sizes that are equal in the first batch to be equal for ever, and compiles anew when they
    turn out not to be: a batch of 24 samples on a model of 24 heads would do. That guess is switched off.

    Numbers such as a norm's epsilon and a LoRA's strength are compiled in. By default they would be tensors on the CPU,
    and torch would want a C++ compiler for them beside the one for the GPU.
    """
    shape_config.use_duck_shape = False
    # Code that several kinds of blocks share has more variants than torch allows by default (8): with one sample and
    # with more, with a gradient and without. Beyond the limit it would run eagerly, and only the clock would tell.
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 64)
    dynamo_config.specialize_float = True
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
