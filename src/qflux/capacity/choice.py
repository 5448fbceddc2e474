"""How a run goes about its steps. None of it changes the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from qflux.memory.streaming import spread


@dataclass(frozen=True)
class Choice:
    """What is chosen for a card, or by hand."""

    most_tokens: int | None
    """Tokens of a pass at most; none: passes are the micro-batches that the data settings ask for."""
    first: int | None
    """The first so many blocks may compute their activations again in the backward pass; none: all of them may."""
    every: int
    """Of those, each (1), every second (2) and so on does."""
    compiled: bool
    streamed: int = 0
    """Blocks whose weights stay in host memory and are copied when it is their turn; of those that are recomputed."""
    keeps_attention: bool = False
    """Recomputed blocks keep what attention gave, and do not compute it again."""
    hosts_inputs: bool = False
    """The inputs of recomputed blocks wait in host memory."""

    def recomputed(self, blocks: int) -> range:
        """Which of so many blocks compute their activations again."""
        return range(blocks)[: self.first][:: self.every]

    def waiting(self, blocks: int) -> list[int]:
        """Which of so many blocks stay in host memory: spread over those that are recomputed."""
        again = self.recomputed(blocks)
        count = min(self.streamed, len(again))
        return [again[place] for place in spread(count, len(again))] if count else []

    def dump(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Choice:
        """From a file; a `ValueError` or `TypeError` if it holds something else."""
        choice = cls(**values)
        numbers = [n for n in (choice.most_tokens, choice.first, choice.every, choice.streamed) if n is not None]
        flags = (choice.compiled, choice.keeps_attention, choice.hosts_inputs)
        is_sound = all(type(n) is int and n >= 0 for n in numbers) and all(type(flag) is bool for flag in flags)
        if not is_sound or not choice.every:
            raise ValueError(f"{values} is no choice")
        return choice
