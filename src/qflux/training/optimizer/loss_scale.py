"""Loss scaling for float16."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """What float16 losses are multiplied by, so that small gradients do not vanish; follows overflows."""

    START, LEAST, GROWTH_INTERVAL = 2.0**16, 1.0, 2000

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(self.START, device=device)
        self.good_steps = torch.zeros((), device=device)

    def update(self, overflow: Tensor) -> None:
        """`overflow` is 1.0 or 0.0: halve the scale, or double it after a long time without."""
        grown = self.good_steps + 1 >= self.GROWTH_INTERVAL
        self.scale *= torch.where(overflow > 0, 0.5, torch.where(grown, 2.0, 1.0))
        self.scale.clamp_(min=self.LEAST)
        self.good_steps.copy_(torch.where((overflow > 0) | grown, 0.0, self.good_steps + 1))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it."""
        return {"scale": self.scale, "good_steps": self.good_steps}
