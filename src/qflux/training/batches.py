"""What the loop trains on: the steps of a run, each with the micro-batches of this rank, read ahead.

1. the plan says which samples are due in a step, and on which rank
2. threads read their embeddings, and draw noise, noise level and dropout, each from (seed, sample, visit) alone
3. the loop gets them as one packed batch
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, tee

import torch

from qflux.cache.encode import OpenedSample, encode_sample, open_sample
from qflux.capacity.shortage import Shortage, first_line
from qflux.config import Config
from qflux.data.batch import Batch, Draw, NoisySample
from qflux.data.cut import recut
from qflux.data.encoded import COMPLETE, EncodedSample, Variant
from qflux.data.noises import Noises
from qflux.data.plan import Batching, MicroBatch, PlannedStep, TrainingPlan
from qflux.data.reader import read_ahead
from qflux.data.sample import Sample, names
from qflux.errors import DataError, QfluxError
from qflux.files.hashing import seed_of
from qflux.losses.objective import StepSize, sample_weight
from qflux.losses.timesteps import NoiseLevels
from qflux.models.facts import Facts
from qflux.models.family import Encoder
from qflux.models.precision import dtype_of
from qflux.training.distributed import World

_LOOKED_AT = 2000
"""Steps among which the largest pass is looked for."""


class SampleReader:
    """Embeddings of samples in two stages: `read` in a thread, `finish` in the loop.

    With an encoder, samples that have images are encoded when they are due; otherwise the cache has them.
    """

    def __init__(self, encoder: Encoder | None = None) -> None:
        self._encoder = encoder

    def read(self, sample: Sample, variant: Variant = COMPLETE) -> EncodedSample | OpenedSample:
        """What can be read without the encoder; an error names the sample."""
        try:
            if self._encoder is not None and sample.images is not None:
                return open_sample(sample, variant)
            assert sample.embeddings is not None
            return sample.embeddings.load(variant)
        except QfluxError as error:
            raise type(error)(f"sample {sample.name}: {error.problem}", error.remedy) from error
        except Exception as error:
            raise DataError(
                f"sample {sample.name} can't be read: {type(error).__name__}: {error}", "look at its files."
            ) from error

    def finish(self, read: EncodedSample | OpenedSample) -> EncodedSample:
        if isinstance(read, EncodedSample):
            return read
        assert self._encoder is not None
        return encode_sample(read, self._encoder)


def training_plan(config: Config, facts: Facts, samples: Sequence[Sample], world_size: int = 1) -> TrainingPlan:
    """The plan of a run. A sample that no micro-batch can hold is an error that names it."""
    budget, noises = config.data.max_tokens, Noises.of(config)
    lengths = [noises.tokens(sample) for sample in samples]
    named = zip(samples, lengths, strict=True)
    large = [f"{sample.name} ({tokens} tokens)" for sample, tokens in named if budget and tokens > budget]
    if large:
        drawn = f", with {noises.per_visit} noises each," if noises.per_visit > 1 else ""
        fewer = ", or lower train.noises_per_sample" if noises.per_visit > 1 else ""
        raise DataError(
            f"{len(large)} samples{drawn} are larger than data.max_tokens {budget}: {', '.join(large[:10])}",
            f"raise data.max_tokens, or choose smaller areas in data.processor{fewer}.",
        )
    return TrainingPlan(
        lengths,
        Batching.of(config, world_size, facts.attention_tokens),
        config.seed,
        [sample.rate for sample in samples],
    )


_Drawn = tuple[Sample, EncodedSample | OpenedSample, tuple[Draw, ...]]
"""A sample as it comes out of a thread: what was read, and what was drawn."""


@dataclass(frozen=True)
class _Part:
    """A micro-batch of one rank before it is read."""

    visits: MicroBatch
    size: StepSize
    counts: bool = True
    drops_nothing: bool = False
    """Captions and controls stay, whatever dropout would draw: for a trial of the largest batch."""


_Read = tuple[_Part, list[_Drawn]]


@dataclass(frozen=True)
class Step:
    """One optimizer step. Iterating over it gives the micro-batches of this rank, each of them once."""

    number: int
    """Steps before it."""
    planned: PlannedStep
    samples: tuple[Sample, ...]
    """Of all ranks, in the order of the plan."""
    _batches: Iterator[Batch] = field(repr=False)

    @property
    def epoch(self) -> int:
        return self.planned.epoch

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


class Batches:
    """The steps of a run, with the micro-batches of one rank."""

    def __init__(
        self,
        config: Config,
        plan: TrainingPlan,
        samples: Sequence[Sample],
        reader: SampleReader,
        levels: NoiseLevels,
        channels: int,
        world: World,
        device: torch.device,
    ) -> None:
        """`channels` is the width of an image token: noise is drawn before latents are there."""
        self.most_tokens: int | None = None
        """Tokens of a pass at most; none: passes are the micro-batches of the plan. May change between steps."""
        self._config = config
        self._plan = plan
        self._samples = samples
        self._reader = reader
        self._levels = levels
        self._channels = channels
        self._noises = Noises.of(config)
        self._lengths = [self._noises.tokens(sample) for sample in samples]
        self._world = world
        self._device = device
        self._dtype = dtype_of(config.model.dtype)

    def cut_to(self, most_tokens: int | None) -> Batches:
        """With passes of at most so many tokens."""
        self.most_tokens = most_tokens
        return self

    def steps(self, start: int, stop: int) -> Generator[Step, None, None]:
        """Steps `start` to `stop`; the same whatever the number of workers."""
        # The plan is walked once: reading is some steps ahead of the loop, and `tee` keeps those in between.
        planned = ((number, step, self.most_tokens, self.cut(step)) for number, step in self._plan.steps(start, stop))
        due, ahead = tee(planned)
        parts = (part for *_, step in ahead for part in self.parts(step))
        with closing(read_ahead(self._read, parts, self._config.data.num_workers, self._describe)) as read:
            for number, step, most, cut in due:
                drawn = (next(read) for _ in cut.ranks[self._world.rank])
                if most == self.most_tokens:
                    yield self._step(number, cut, drawn)
                    for _ in drawn:  # a step that was begun again leaves some behind
                        pass
                else:  # it was read before passes had to become smaller
                    now = self.cut(step)
                    yield self._step(number, now, self._regrouped(list(drawn), now))

    def again(self, step: Step) -> Step:
        """The same step from its beginning, in passes that are no larger than they may be now."""
        planned = self.cut(step.planned)
        return self._step(step.number, planned, (self._read(part) for part in self.parts(planned)))

    def largest(self, start: int, stop: int) -> Batch:
        """The pass of the most tokens in steps `start` to `stop`, with nothing dropped from its samples."""
        tokens, visits = self._plan.largest(start, stop)
        if self.most_tokens is not None:
            steps = (self.cut(planned) for _, planned in islice(self._plan.steps(start, stop), _LOOKED_AT))
            passes = (batch for planned in steps for rank in planned.ranks for batch in rank)
            tokens, visits = max(((self._tokens_of(batch), batch) for batch in passes), key=lambda found: found[0])
        part = _Part(visits, StepSize(tokens, len(visits)), drops_nothing=True)
        return self._collated(*self._read(part))

    def cut(self, planned: PlannedStep) -> PlannedStep:
        """A step of the plan in passes that fit."""
        return planned if self.most_tokens is None else recut(planned, self._lengths, self.most_tokens)

    def shortage(self, visits: MicroBatch, error: Exception) -> Shortage:
        """Of a pass over these visits; none of them: of what stands in for nothing."""
        names = tuple(self._samples[visit.sample].name for visit in visits) or ("a stand-in",)
        lengths = tuple(int(self._lengths[visit.sample]) for visit in visits) or (min(self._lengths),)
        return Shortage(names, lengths, first_line(error))

    def _tokens_of(self, visits: MicroBatch) -> int:
        return sum(self._lengths[visit.sample] for visit in visits)

    def _step(self, number: int, planned: PlannedStep, drawn: Iterator[_Read]) -> Step:
        samples = tuple(self._samples[visit.sample] for visit in planned.visits)
        return Step(number, planned, samples, (self._collated(*read) for read in drawn))

    def _regrouped(self, read: Sequence[_Read], planned: PlannedStep) -> Iterator[_Read]:
        """What was read for passes of another cut of the same step."""
        counted = (zip(part.visits, items, strict=True) for part, items in read if part.counts)
        known = {visit: drawn for pairs in counted for visit, drawn in pairs}
        for part in self.parts(planned):
            # What stands in for nothing has another weight than the same sample where it counts.
            yield (part, [known[visit] for visit in part.visits]) if part.counts else self._read(part)

    def parts(self, planned: PlannedStep) -> list[_Part]:
        """What this rank does in a step.

        In the last step of an epoch a rank may have nothing to do. The others' collectives need it all the same, so it
        computes a sample of another rank with weight 0.
        """
        targets, noises = [self._samples[visit.sample].shapes.target_tokens for visit in planned.visits], self._noises
        size = StepSize(noises.per_visit * sum(targets), noises.per_visit * planned.samples)
        cheapest = min(planned.visits, key=lambda visit: self._samples[visit.sample].shapes.tokens)
        return [_Part(visits or (cheapest,), size, counts=bool(visits)) for visits in planned.ranks[self._world.rank]]

    def _read(self, part: _Part) -> _Read:
        """In a thread: everything but the encoder's work."""
        return part, [self._draw(self._samples[visit.sample], visit.number, part) for visit in part.visits]

    def _draw(self, sample: Sample, visit: int, part: _Part) -> _Drawn:
        config, tokens = self._config, sample.shapes.target_tokens
        variant = COMPLETE if part.drops_nothing else drawn_variant(config, sample, visit)
        is_blank = not part.drops_nothing and is_blank_visit(config, sample.id, visit)
        if is_blank:
            variant = variant._replace(caption=False, number=0)
        read, draws = self._reader.read(sample, variant), []
        for number in self._noises.numbers(visit):
            sigma, noise = self._levels.draw(config.seed, sample.id, number, tokens, self._channels)
            weight = sample_weight(config.loss, part.size, tokens, sigma, sample.is_prior)
            draws.append(Draw(sigma, noise, weight if part.counts else 0.0, is_blank))
        return sample, read, tuple(draws)

    def _collated(self, part: _Part, drawn: list[_Drawn]) -> Batch:
        """In the loop: encode what is not encoded yet, and put the samples into one batch."""
        items = [NoisySample(sample, self._encoded(read), draws) for sample, read, draws in drawn]
        return Batch.collate(items, self._device, self._dtype, part.counts, self._noises.shares_prefix)

    def _encoded(self, read: EncodedSample | OpenedSample) -> EncodedSample:
        encoded, preserve = self._reader.finish(read), self._config.loss.preserve
        # Not in the loss alone: what a noisy image shows outside of the region decides what sampling ends with there.
        keeps = preserve.weight > 0 and preserve.toward == "control"
        return encoded.keeping_the_rest() if keeps else encoded

    def _describe(self, part: _Part) -> str:
        return names([self._samples[visit.sample] for visit in part.visits])


def drawn_variant(config: Config, sample: Sample, visit: int) -> Variant:
    """What a visit shows of a sample: one of its captions, and what dropout leaves.

    It is a function of (seed, sample, visit) and of nothing else.
    """
    draw = random.Random(seed_of("dropout", config.seed, sample.id, visit))
    caption = draw.random() >= config.train.caption_dropout
    controls = draw.random() >= config.train.control_dropout
    number = 0
    if caption and sample.further_captions:
        number = random.Random(seed_of("caption", config.seed, sample.id, visit)).randrange(len(sample.captions))
    return Variant(caption, controls, number)


def is_blank_visit(config: Config, sample_id: str, visit: int) -> bool:
    """Whether a visit is about the model without a prompt."""
    share = config.loss.preserve.blank
    return share > 0 and random.Random(seed_of("blank", config.seed, sample_id, visit)).random() < share
