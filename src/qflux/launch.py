"""Which of the processes this one is, as `torchrun` and `accelerate launch` say it in the environment. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What a launcher has started; without a launcher there is one process."""

    rank: int = 0
    local_rank: int = 0
    """Among the processes of this machine: the number of the GPU it takes."""
    world_size: int = 1
    local_size: int = 1
    """Processes of this machine; all of them, if nobody says."""

    @property
    def is_first(self) -> bool:
        """Only the first process writes files of a run, shows progress and prints results."""
        return self.rank == 0

    @property
    def label(self) -> str:
        """What a message of this process begins with, if there are others."""
        return f"process {self.rank}: " if self.world_size > 1 else ""


def launched() -> Launch:
    """The processes of this program. It is read anew each time: a test may run several worlds in one process."""
    size, local_rank = _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0)  # that alone chooses a GPU, too
    return Launch(_number("RANK", 0) if size > 1 else 0, local_rank, size, max(1, _number("LOCAL_WORLD_SIZE", size)))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdigit() else default
