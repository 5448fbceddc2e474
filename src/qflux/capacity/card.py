"""What a run may take of a GPU: the one that is there, or one that somebody asks about."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qflux.capacity.flops import PEAKS, peak_of

GIB = 2**30
_LIKE = ((10e9, "RTX 4060"), (14e9, "RTX 4070"), (20e9, "RTX 4080"), (28e9, "RTX 4090"), (40e9, "RTX 5090"),
         (60e9, "L40S"), (100e9, "H100"), (200e9, "H200"))  # fmt: skip
"""A card that has about so much memory: its speed is taken where nobody has said which card it is."""


@dataclass(frozen=True)
class Card:
    """A GPU, as a plan sees it."""

    name: str
    memory: int
    """Bytes that a run may take."""
    flops: float
    """The most arithmetic it can do in a second, in bfloat16."""
    link: float = 20e9
    """Bytes that it can get from host memory in a second."""

    @classmethod
    def of(cls, device: torch.device, memory: int | None) -> Card | None:
        """The card that a run is for; none on a CPU, unless somebody says how much memory a card would have."""
        if device.type == "cuda":
            held = torch.cuda.memory_allocated(device)  # encoders, for example, that stay
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
            name = torch.cuda.get_device_name(device)
            return cls(name, min(free, (memory or held + free) - held), peak_of(device) or _like(free)[1])
        if memory is None:
            return None
        name, flops = _like(memory)
        return cls(f"a card like {name}", memory, flops)


def _like(memory: float) -> tuple[str, float]:
    name = next((name for most, name in _LIKE if memory <= most), _LIKE[-1][1])
    return name, PEAKS[name]


def limit_memory(device: torch.device, memory: int | None) -> None:
    """Let this process take no more than was asked for, so that what does not fit is found here and not elsewhere."""
    if device.type == "cuda" and memory is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device)
