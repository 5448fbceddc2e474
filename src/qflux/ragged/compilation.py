"""Compile blocks once for all sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as shape_config
from torch import nn
from torch._dynamo.callback import callback_handler


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


@contextmanager
def watched(listener: Callable[[int, float], None]) -> Iterator[None]:
    """Tell `listener` whenever a piece of code is begun or done: how many are done, and the seconds they took.

    A first step compiles for up to a minute, and would seem to hang.
    """
    pieces, spent, started = 0, 0.0, 0.0

    def begin(_: object) -> None:
        nonlocal started
        started = time.perf_counter()
        listener(pieces, spent)

    def end(_: object) -> None:
        nonlocal pieces, spent
        pieces, spent = pieces + 1, spent + time.perf_counter() - started
        listener(pieces, spent)

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
