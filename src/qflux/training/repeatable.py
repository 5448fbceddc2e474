"""Arithmetic that repeats to the last bit on a GPU too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Inside, only deterministic kernels are used, if that is wanted.

    The backward of fast attention kernels adds up in an order that varies from run to run; on a CPU nothing does.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrix product runs
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
