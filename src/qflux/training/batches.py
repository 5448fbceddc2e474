"""What the loop eats: the micro-batches of one rank, read ahead, each with its noise and its weight in the step.

A micro-batch comes from the cache, or is encoded on the fly; nothing else differs.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qflux.cache.cache import EmbeddingCacheManager, Manifest
from qflux.cache.stored import StoredSample
from qflux.config import Config
from qflux.data.batch import EditBatch
from qflux.data.encoded import WHOLE, EncodedExample, Variant
from qflux.data.plan import Batching, MicroBatch, PlannedStep, TrainingPlan
from qflux.data.reader import read_ahead
from qflux.errors import DataError, QfluxError
from qflux.files.hashing import seed_of
from qflux.losses.objective import StepSize, sample_weight
from qflux.losses.timesteps import NoiseLevels
from qflux.models.family import Encoder, TextCounter
from qflux.training.encode import OpenedExample, TrainingSample, encode_example, open_example


class Provider(Protocol):
    """Where encoded samples come from, in two stages: `read` in a thread, `finish` in the loop."""

    def text_tokens(self, sample: TrainingSample) -> int:
        """The length of the sample's prompt, without encoding it."""

    def read(self, sample: TrainingSample, variant: Variant) -> EncodedExample | OpenedExample: ...

    def finish(self, read: EncodedExample | OpenedExample) -> EncodedExample: ...


class FromCache:
    """Samples as `qflux cache` left them."""

    def __init__(self, store: EmbeddingCacheManager, manifests: Mapping[str, Manifest]) -> None:
        self._store = store
        self._manifests = manifests

    def text_tokens(self, sample: TrainingSample) -> int:
        return sample.text_tokens if isinstance(sample, StoredSample) else self._manifests[sample.address].text_tokens

    def read(self, sample: TrainingSample, variant: Variant) -> EncodedExample:
        if isinstance(sample, StoredSample):
            return sample.load(variant)
        return self._store.load(sample.keys, variant)

    def finish(self, read: EncodedExample | OpenedExample) -> EncodedExample:
        assert isinstance(read, EncodedExample)
        return read


class FromImages:
    """Samples decoded and encoded when they are due."""

    def __init__(self, encoder: Encoder, count: TextCounter) -> None:
        self._encoder = encoder
        self._count = count

    def text_tokens(self, sample: TrainingSample) -> int:
        if isinstance(sample, StoredSample):
            return sample.text_tokens
        return self._count(sample.example.prompt, [view.size for view in sample.views if view]).used

    def read(self, sample: TrainingSample, variant: Variant) -> EncodedExample | OpenedExample:
        return sample.load(variant) if isinstance(sample, StoredSample) else open_example(sample, variant)

    def finish(self, read: EncodedExample | OpenedExample) -> EncodedExample:
        return read if isinstance(read, EncodedExample) else encode_example(read, self._encoder)


def training_plan(
    config: Config, samples: Sequence[TrainingSample], provider: Provider, world_size: int = 1
) -> TrainingPlan:
    """The plan of a run. A sample that no micro-batch can hold is an error that names it."""
    lengths = [provider.text_tokens(sample) + sample.image_tokens for sample in samples]
    budget = config.data.max_tokens
    large = [f"{s.example.name} ({n} tokens)" for s, n in zip(samples, lengths, strict=True) if budget and n > budget]
    if large:
        raise DataError(
            f"{len(large)} samples are larger than data.max_tokens {budget}: {', '.join(large[:10])}",
            "raise data.max_tokens, or choose smaller areas in data.processor.",
        )
    return TrainingPlan(
        lengths, Batching.of(config, world_size), config.seed, [sample.example.rate for sample in samples]
    )


@dataclass(frozen=True)
class Assignment:
    """A micro-batch of one rank, and the step that it is part of.

    In the last step of an epoch a rank may have nothing to do. The others' collectives need it all the same, so it
    computes a sample of another rank with weight 0.
    """

    visits: MicroBatch
    size: StepSize
    is_stand_in: bool = False
    drops_nothing: bool = False
    """Captions and controls stay, whatever dropout would draw: for a trial of the largest batch."""


def assignments(step: PlannedStep, rank: int, samples: Sequence[TrainingSample]) -> list[Assignment]:
    """What one rank does in a step."""
    size = StepSize(sum(samples[visit.sample].target_tokens for visit in step.visits), step.samples)
    cheapest = min(step.visits, key=lambda visit: samples[visit.sample].image_tokens)
    return [Assignment(visits or (cheapest,), size, is_stand_in=not visits) for visits in step.ranks[rank]]


class Feed:
    """Turns assignments into tensors."""

    def __init__(
        self,
        config: Config,
        samples: Sequence[TrainingSample],
        provider: Provider,
        levels: NoiseLevels,
        channels: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._levels = levels
        self._samples = samples
        self._provider = provider
        self._channels = channels
        self._device = device
        self._dtype = dtype

    def __call__(self, assigned: Iterable[Assignment]) -> Generator[EditBatch, None, None]:
        """One batch per assignment, in order, the same whatever the number of workers."""
        for read in read_ahead(self._read, assigned, self._config.data.num_workers, self._names):
            yield EditBatch.collate(
                [self._provider.finish(item.content) for item in read],
                [item.noise for item in read],
                [item.sigma for item in read],
                self._device,
                self._dtype,
                [item.weight for item in read],
            )

    def _read(self, assigned: Assignment) -> list[_Read]:
        return [self._read_one(self._samples[visit.sample], visit.number, assigned) for visit in assigned.visits]

    def _read_one(self, sample: TrainingSample, visit: int, assigned: Assignment) -> _Read:
        config, tokens = self._config, sample.target_tokens
        variant = WHOLE if assigned.drops_nothing else drawn_variant(config, sample.id, visit)
        content = read_named(self._provider, sample, variant)
        sigma, noise = self._levels.draw(config.seed, sample.id, visit, tokens, self._channels)
        weight = sample_weight(config.loss, assigned.size, tokens, sigma, sample.example.is_prior)
        return _Read(content, sigma, noise, 0.0 if assigned.is_stand_in else weight)

    def _names(self, assigned: Assignment) -> str:
        return ", ".join(self._samples[visit.sample].example.name for visit in assigned.visits)


def read_named(provider: Provider, sample: TrainingSample, variant: Variant) -> EncodedExample | OpenedExample:
    """`provider.read`, with the sample's name in every error."""
    try:
        return provider.read(sample, variant)
    except QfluxError as error:
        raise type(error)(f"sample {sample.example.name}: {error.problem}", error.remedy) from error
    except Exception as error:
        raise DataError(
            f"sample {sample.example.name} can't be read: {type(error).__name__}: {error}", "look at its files."
        ) from error


def drawn_variant(config: Config, sample_id: str, visit: int) -> Variant:
    """What dropout leaves of a sample on one visit: a function of (seed, sample, visit) and of nothing else."""
    draw = random.Random(seed_of("dropout", config.seed, sample_id, visit))
    return Variant(
        caption=draw.random() >= config.train.caption_dropout, controls=draw.random() >= config.train.control_dropout
    )


@dataclass(frozen=True)
class _Read:
    """A sample as it comes out of a thread."""

    content: EncodedExample | OpenedExample
    sigma: float
    noise: Tensor
    weight: float
