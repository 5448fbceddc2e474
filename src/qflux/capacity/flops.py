"""How much arithmetic a step is, and how much a device could do.

Counted is the model's arithmetic on valid tokens: forward once, backward once through weights and, where they train,
once for their own gradients. Recomputation and padding are not counted, so they show as a lower utilisation.
"""

from __future__ import annotations

import torch

from qflux.models.family import Arithmetic

PEAKS = {  # dense bf16 with float32 sums, FLOP/s, by a part of the device's name
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX PRO 6000": 504e12,
    "RTX 5090": 210e12,
    "RTX 5080": 113e12,
    "RTX 5070": 62e12,
    "RTX 4090": 165e12,
    "RTX 4080": 97e12,
    "RTX 4070": 58e12,
    "RTX 4060": 30e12,
    "RTX 3080": 60e12,
    "RTX 3060": 25e12,
    "RTX 6000 Ada": 364e12,
    "RTX 3090": 71e12,
    "A6000": 155e12,
}


def peak_of(device: torch.device) -> float | None:
    """The most FLOP/s a device can do, if that is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class StepFlops:
    """The arithmetic of a step, from that of one forward pass."""

    def __init__(self, arithmetic: Arithmetic, trains_all: bool, looks: int = 0) -> None:
        """`looks` are forward passes besides, without a gradient."""
        self._arithmetic = arithmetic
        self._passes = (3 if trains_all else 2) + looks
        """Of linear layers: forward, the inputs' gradients, and the weights' where they train."""
        self._attention = 3 + looks

    def __call__(self, tokens: int, pairs: int) -> float:
        """FLOP of a step on so many tokens, and pairs of them of which one sees the other."""
        return self._passes * self._arithmetic.per_token * tokens + self._attention * self._arithmetic.per_pair * pairs
