"""Several noises at one visit: how they are numbered, and how many tokens they are.

Where text and controls do not see the target, they stand once before all the noisy targets of a visit; elsewhere every
noise takes a copy of the whole sample. Either way the result is that of as many samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from qflux.config import Config
from qflux.data.sample import Sample
from qflux.models.registry import facts_of


@dataclass(frozen=True)
class Noises:
    """What is drawn at a visit."""

    per_visit: int = 1
    shares_prefix: bool = False
    """All stand behind one text and its controls."""

    @classmethod
    def of(cls, config: Config) -> Noises:
        return cls(config.train.noises_per_sample, facts_of(config.family).shares_prefix)

    def numbers(self, visit: int) -> range:
        """The noises of a visit: those that as many visits with one noise would draw."""
        return range(visit * self.per_visit, (visit + 1) * self.per_visit)

    def tokens(self, sample: Sample) -> int:
        """Of a visit to a sample."""
        targets = sample.shapes.target_tokens
        prefixes = 1 if self.shares_prefix else self.per_visit
        return prefixes * (sample.tokens - targets) + self.per_visit * targets
