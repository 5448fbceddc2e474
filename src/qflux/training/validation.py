"""What a checkpoint is worth in numbers: the loss on held-out samples, at noise and noise levels that never change.

Nothing but the cache is needed. All ranks take part: a sharded model can't run on one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from qflux.cache.encode import OpenedSample
from qflux.config import Config
from qflux.data.batch import Batch, Draw, NoisySample
from qflux.data.encoded import EncodedSample
from qflux.data.noises import Noises
from qflux.data.packing import fitting
from qflux.data.reader import read_ahead
from qflux.data.sample import Sample
from qflux.files.hashing import key_of
from qflux.losses.mse import MseLoss
from qflux.losses.timesteps import NoiseLevels, NoiseShift
from qflux.models.precision import dtype_of
from qflux.runs.journal import HeldOut
from qflux.training.batches import SampleReader
from qflux.training.distributed import World
from qflux.training.model import TrainedModel


@dataclass(frozen=True)
class _Trial:
    """A sample at one of its fixed noise levels."""

    sample: Sample
    level: int


class HeldOutLoss:
    """Plain squared error of the velocity; masks and weightings are left out, so that runs can be compared too."""

    def __init__(
        self,
        config: Config,
        samples: Sequence[Sample],
        reader: SampleReader,
        noise: NoiseLevels,
        world: World,
        device: torch.device,
    ) -> None:
        self._config = config
        self._noise = noise
        self._reader = reader
        self._world = world
        self._device = device
        self._dtype = dtype_of(config.model.dtype)
        self._levels = config.validation.noise_levels
        self._shares_prefix = Noises.of(config).shares_prefix
        chosen = list(samples)[: config.validation.max_samples]
        self._trials = [_Trial(sample, level) for sample in chosen for level in range(self._levels)]
        # As many to a batch as have the length of the longest: the same batches in every run.
        lengths = [trial.sample.tokens for trial in self._trials]
        self._batches = fitting(lengths, max(lengths, default=0))
        # It is measured at all levels, whichever of them train.
        timesteps = [config.loss.timesteps.model_dump(mode="json", exclude={"low", "high"})]
        timesteps += [asdict(noise.shift)] if noise.shift != NoiseShift() else []
        keys = [sample.embeddings.identity for sample in chosen if sample.embeddings is not None]
        self.measure = key_of(keys, self._levels, config.seed, *timesteps)[:16]
        """Losses of the same measure can be compared."""

    def __bool__(self) -> bool:
        return bool(self._trials)

    def __call__(self, model: TrainedModel) -> HeldOut:
        """Measure a model."""
        terms = torch.zeros(len(self._trials), device=self._device)
        # Every rank runs as many batches as the others; where there is none left, one that does not count.
        rounds = -(-len(self._batches) // self._world.size)
        mine = [self._world.rank + self._world.size * turn for turn in range(rounds)]
        numbers = [number if number < len(self._batches) else None for number in mine]
        batches = [self._batches[number or 0] for number in numbers]
        with model.evaluating():
            read = read_ahead(self._read, batches, self._config.data.num_workers)
            for number, places, content in zip(numbers, batches, read, strict=True):
                batch = self._collate(places, content)
                errors = MseLoss()(model.velocity(batch), batch.velocity(), reduction="none").mean(-1)
                if number is not None:
                    found = torch.stack([error.mean() for error in errors.split(batch.target_lengths)])
                    terms[places[0] : places[0] + len(places)] = found
        return self._averaged(self._world.sum_(terms))

    def _averaged(self, terms: torch.Tensor) -> HeldOut:
        """Every target token counts the same."""
        values = terms.double().cpu().numpy()
        tokens = np.array([trial.sample.shapes.target_tokens for trial in self._trials], dtype=np.float64)
        levels = np.array([trial.level for trial in self._trials])
        return HeldOut(
            float(np.average(values, weights=tokens)),
            [float(np.average(values[levels == k], weights=tokens[levels == k])) for k in range(self._levels)],
        )

    def _read(self, places: list[int]) -> list[EncodedSample | OpenedSample]:
        return [self._reader.read(self._trials[place].sample) for place in places]

    def _collate(self, places: list[int], content: list[EncodedSample | OpenedSample]) -> Batch:
        items = list[NoisySample]()
        for place, read in zip(places, content, strict=True):
            trial = self._trials[place]
            # Its other levels come one after another, and may share what does not depend on the noise.
            known = items and items[-1].sample is trial.sample
            encoded = items[-1].encoded if known else self._reader.finish(read)
            draw = self._drawn(trial, encoded)
            if known and self._shares_prefix:
                items[-1] = replace(items[-1], draws=(*items[-1].draws, draw))
            else:
                items.append(NoisySample(trial.sample, encoded, (draw,)))
        return Batch.collate(items, self._device, self._dtype, shares_prefix=self._shares_prefix)

    def _drawn(self, trial: _Trial, encoded: EncodedSample) -> Draw:
        seed, shape = self._config.seed, encoded.target.shape
        return Draw(*self._noise.fixed_draw(seed, encoded.id, trial.level, self._levels, *shape))
