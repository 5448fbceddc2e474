"""A running average of what trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from qflux.config import EmaSettings
from qflux.training.distributed import local


class Ema:
    """A running average of parameters."""

    def __init__(self, settings: EmaSettings, parameters: Mapping[str, nn.Parameter]) -> None:
        self._settings = settings
        self._parameters = parameters
        self.average = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def follow(self, step: int, skipped: Tensor) -> None:
        """Move towards the parameters after a step, counted from 0; not at all if it was skipped."""
        decay = self._settings.decay
        if self._settings.warmup:
            decay = min(decay, (1 + step) / (10 + step))
        weight = (1 - decay) * (1 - skipped)
        for name, parameter in self._parameters.items():  # one at a time: no second copy of a whole model
            local(self.average[name]).lerp_(local(parameter), weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The average in the place of the parameters, for the length of the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Exchange average and parameters; a second time puts them back."""
        for name, parameter in self._parameters.items():
            kept = local(parameter).clone()
            local(parameter).copy_(local(self.average[name]))
            local(self.average[name]).copy_(kept)
