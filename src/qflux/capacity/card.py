"""What a run may take of a GPU: the one that is there, or one that somebody asks about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from qflux.capacity.flops import PEAKS, peak_of
from qflux.launch import launched
from qflux.memory.placing import free_memory

_LIKE = ((10e9, "RTX 4060"), (14e9, "RTX 4070"), (20e9, "RTX 4080"), (28e9, "RTX 4090"), (40e9, "RTX 5090"),
         (60e9, "L40S"), (100e9, "H100"), (200e9, "H200"))  # fmt: skip
"""A card that has about so much memory: its speed is taken where nobody has said which card it is."""
_GROUP = Path("/sys/fs/cgroup")
_COPIED = 2**26
"""Bytes of a copy that is timed."""


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
    host: int | None = None
    """Bytes of host memory that are free; none if nobody knows, as for a card that is not here."""

    @classmethod
    def of(cls, device: torch.device, memory: int | None) -> Card | None:
        """The card that a run is for; none on a CPU, unless somebody says how much memory a card would have."""
        free = free_memory(device, memory)
        if free is None:
            return None
        name, flops = _like(free)
        if device.type != "cuda":
            return cls(f"a card like {name}", free, flops)
        name = torch.cuda.get_device_name(device)
        return cls(name, free, peak_of(device) or flops, _measured_link(device), _free_host_memory())


def _like(memory: float) -> tuple[str, float]:
    name = next((name for most, name in _LIKE if memory <= most), _LIKE[-1][1])
    return name, PEAKS[name]


def _free_host_memory() -> int | None:
    """What the system could give to one of the processes on this machine; in a container, no more than that has."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    try:
        limit, used = (int((_GROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    except (OSError, ValueError):  # no group, or one without a limit
        pass
    return free // launched().local_size


def _measured_link(device: torch.device) -> float:
    """Bytes a second from host memory to a device, of the fastest of a few copies."""
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    there, seconds = torch.empty_like(host, device=device), []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        there.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return _COPIED / min(seconds)
