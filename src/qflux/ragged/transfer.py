"""From host to device without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """A host tensor on `device`. A copy from ordinary memory would make the host wait for all work queued before it."""
    if device is not None and torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
