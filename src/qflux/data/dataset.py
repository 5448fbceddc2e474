"""From listed samples to usable ones: facts of every image, transforms, ids; what trains and what is held out.

1. `_listed`        every source is listed
2. `FileIndex`      headers and hashes of all images, in parallel, each file once in its life
3. `_sized`         every image of a sample gets its transform, from sizes alone
4. `_merged`        samples with equal content become one that trains as often as all of them
5. `_split`         held-out samples are set apart, chosen by content
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from qflux.config import CacheSource, DataSettings, Source
from qflux.data.images.decode import ImageFacts, ImageRef, shown
from qflux.data.images.index import FileIndex
from qflux.data.images.sizes import ImageProcessor, Transform
from qflux.data.sources import read_source
from qflux.data.sources.listing import EditExample, Fault, Listing
from qflux.errors import DataError, collected
from qflux.files.hashing import key_of
from qflux.ragged.shapes import ImageShape, image_tokens, token_shape

if TYPE_CHECKING:
    from qflux.cache.stored import StoredSample

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class ImagePolicy(Protocol):
    """What a model family says about a sample's images."""

    @property
    def prompt_view(self) -> Callable[[int, tuple[int, int], Transform], Transform | None]:
        """How the text encoder sees a control: from its index, its own (width, height) and its transform."""

    def check_controls(self, count: int, what: str) -> None:
        """A `DataError` if a sample can't have this many controls."""


@dataclass(frozen=True)
class SizedExample:
    """A sample and what will become of its images."""

    id: str
    """From content alone: the same wherever the files are and however they are listed."""
    content: str
    """The same, for a class image as well: those have noise of their own, and so ids of their own."""
    example: EditExample
    facts: tuple[ImageFacts, ...]
    """One per image, target first."""
    transforms: tuple[Transform, ...]
    """One per image, target first."""
    views: tuple[Transform | None, ...]
    """One per control: how the text encoder sees it, if it does."""
    mask_hash: str | None

    @property
    def img_shapes(self) -> tuple[ImageShape, ...]:
        return tuple(token_shape(*transform.size) for transform in self.transforms)

    @property
    def image_tokens(self) -> int:
        return image_tokens(self.img_shapes)

    @property
    def target_tokens(self) -> int:
        return image_tokens(self.img_shapes[:1])

    @property
    def crops_first_control(self) -> bool:
        """The first control has another aspect ratio than the target, and loses more than a step to the crop."""
        if len(self.facts) < 2:
            return False
        target, control = self.transforms[:2]
        return control.crops(*self.facts[1].size) and not target.crops(*self.facts[0].size)


@dataclass
class SampleSet:
    """Everything the configured sources hold."""

    training: list[SizedExample] = field(default_factory=list)
    """In the order of their ids."""
    held_out: list[SizedExample] = field(default_factory=list)
    stored: list[StoredSample] = field(default_factory=list)
    """Samples that exist only as embeddings."""
    stored_held_out: list[StoredSample] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)

    @property
    def all(self) -> list[SizedExample]:
        return [*self.training, *self.held_out]


def gather(
    settings: DataSettings, policy: ImagePolicy, index: FileIndex, progress: Progress | None = None
) -> SampleSet:
    """The samples of a config, and everything that is wrong with the rest."""
    gathered = SampleSet()
    listings = _listed(settings.training_sources, gathered.stored)
    listings += _listed(settings.class_sources, gathered.stored, is_prior=True)
    apart_sources = settings.held_out.sources if settings.held_out and settings.held_out.sources else []
    apart = _listed(apart_sources, gathered.stored_held_out)
    gathered.listings = [*listings, *apart]
    for listing in gathered.listings:
        gathered.faults += listing.faults
        gathered.notes += listing.notes

    examples, validation = (
        [example for listing in part if not listing.is_stored for example in listing.examples]
        for part in (listings, apart)
    )
    sized = _sized([*examples, *validation], settings, policy, index, gathered, progress)
    training = [sample for number, sample in sized if number < len(examples)]
    held_out = [sample for number, sample in sized if number >= len(examples)]
    gathered.training, gathered.held_out = _merged(training, gathered), _merged(held_out, gathered)
    _split(settings, gathered)
    cropped = [str(sample.example.controls[0]) for sample in gathered.all if sample.crops_first_control]
    if cropped:
        gathered.notes.append(
            f"{len(cropped)} first controls have another aspect ratio than their target and are cropped to it: "
            + ", ".join(cropped[:10])
        )
    return gathered


def require_usable(gathered: SampleSet, settings: DataSettings) -> None:
    """Say what there is to say; an error for faults unless they may be skipped, and if nothing is left."""
    for note in gathered.notes:
        logger.warning("%s", note)
    names = ", ".join(listing.source for listing in gathered.listings)
    if any(fault.is_fatal for fault in gathered.faults) or (gathered.faults and settings.on_bad_sample == "error"):
        remedies = dict.fromkeys(fault.remedy for fault in gathered.faults if fault.remedy)
        remedy = " ".join([*list(remedies)[:3], "data.on_bad_sample: skip leaves such samples out and names them."])
        raise collected(DataError, f"the data in {names} is not all usable", list(map(str, gathered.faults)), remedy)
    for fault in gathered.faults:
        logger.warning("skipped: %s", fault)
    if not gathered.training and not gathered.stored:
        skipped = f"; {len(gathered.faults)} were skipped" if gathered.faults else ""
        raise DataError(f"no usable sample in {names}{skipped}", "`qflux inspect` shows what is wrong with the data.")


def _listed(sources: Sequence[Source], stored: list[StoredSample], is_prior: bool = False) -> list[Listing]:
    """Every source's listing; samples that exist only as embeddings are also put into `stored`."""
    listings = []
    for source in sources:
        try:
            if isinstance(source, CacheSource):
                from qflux.cache.stored import read_stored  # noqa: PLC0415  (imports torch)

                samples, listing = read_stored(source, is_prior)
                stored += samples
            else:
                listing = read_source(source, is_prior)
        except DataError as error:
            name = shown(source.path)
            listing = Listing(name, faults=[Fault(name, error.problem, error.remedy, name, is_fatal=True)])
        listings.append(listing)
    return listings


def _sized(
    examples: Sequence[EditExample],
    settings: DataSettings,
    policy: ImagePolicy,
    index: FileIndex,
    gathered: SampleSet,
    progress: Progress | None,
) -> list[tuple[int, SizedExample]]:
    """Every usable example with its number; the others become faults."""
    images: list[ImageRef] = [
        ref for example in examples for ref in (*example.images, *([example.mask] if example.mask else []))
    ]
    facts = iter(index.facts(images, progress))
    processor = ImageProcessor(settings.processor)
    sized = []
    for number, example in enumerate(examples):
        found = [next(facts) for _ in example.images]
        mask = next(facts) if example.mask else None
        broken = [fact for fact in (*found, mask) if isinstance(fact, DataError)]
        try:
            if broken:
                raise broken[0]
            known = tuple(fact for fact in found if isinstance(fact, ImageFacts))
            sized.append((number, _size_one(example, known, mask, processor, policy)))
        except DataError as error:
            gathered.faults.append(Fault(example.name, error.problem, error.remedy, example.source))
    return sized


def _size_one(
    example: EditExample,
    facts: tuple[ImageFacts, ...],
    mask: ImageFacts | DataError | None,
    processor: ImageProcessor,
    policy: ImagePolicy,
) -> SizedExample:
    policy.check_controls(len(example.controls), str(example.target))
    target = processor.target(*facts[0].size, name=str(example.target))
    transforms: list[Transform] = [target]
    views = []
    for number, (control, fact) in enumerate(zip(example.controls, facts[1:], strict=True)):
        transforms.append(processor.control(number, *fact.size, target, str(control)))
        views.append(policy.prompt_view(number, fact.size, transforms[-1]))
    if isinstance(mask, ImageFacts) and mask.size != facts[0].size:
        sizes = " and ".join(f"{fact.width}x{fact.height}" for fact in (mask, facts[0]))
        raise DataError(
            f"{example.mask}: the mask and its target differ in size: {sizes}", "give the mask the target's size."
        )
    mask_hash = mask.hash if isinstance(mask, ImageFacts) else None
    content = key_of("id", [fact.hash for fact in facts], example.prompt, mask_hash)
    identity = key_of("class image", content) if example.is_prior else content
    return SizedExample(identity, content, example, facts, tuple(transforms), tuple(views), mask_hash)


def _merged(samples: list[SizedExample], gathered: SampleSet) -> list[SizedExample]:
    """One sample per content, sorted by id. Equal ones would share their noise; merged, each visit has its own."""
    unique: dict[tuple[str, bool], SizedExample] = {}
    repeated = []
    for sample in samples:
        key = (sample.id, sample.example.is_prior)
        first = unique.get(key)
        if first is None:
            unique[key] = sample
        else:
            repeated.append(f"{sample.example.name} = {first.example.name}")
            rate = first.example.rate + sample.example.rate
            unique[key] = replace(first, example=replace(first.example, rate=rate))
    if repeated:
        gathered.notes.append(
            f"{len(repeated)} samples are equal to another one and are merged with it, which then trains as often as "
            f"both: {', '.join(repeated[:10])}"
        )
    return sorted(unique.values(), key=lambda sample: (sample.id, sample.example.is_prior))


def _split(settings: DataSettings, gathered: SampleSet) -> None:
    """Set held-out samples apart, by content and not by seed.

    A fraction is a threshold on a hash of each sample, so that adding samples moves none; a count takes the lowest.
    """
    held_out = settings.held_out
    if held_out is None:
        return
    if held_out.sources:
        ids = {sample.id for sample in gathered.training}
        leaked = [sample.example.name for sample in gathered.held_out if sample.id in ids]
        if leaked:
            gathered.notes.append(f"{len(leaked)} held-out samples are also trained on: {', '.join(leaked[:10])}")
        return
    everything: list[SizedExample | StoredSample] = [*gathered.training, *gathered.stored]
    eligible = [sample for sample in everything if not sample.example.is_prior]
    order = sorted(eligible, key=lambda sample: key_of("held out", sample.id))
    if held_out.fraction is not None:
        threshold = int(held_out.fraction * 16**15)
        chosen = {s.id for s in order if int(key_of("held out", s.id)[:15], 16) < threshold} or {
            s.id for s in order[:1]
        }
    else:
        chosen = {sample.id for sample in order[: held_out.count]}
    if len(chosen) >= len(eligible) > 0:
        problem = f"it takes {len(chosen)} of {len(eligible)} samples: none would be left to train on"
        gathered.faults.append(Fault("data.held_out", problem, "hold out fewer samples.", is_fatal=True))
        return
    leaked = [s.example.name for s in gathered.training if s.example.is_prior and s.content in chosen]
    if leaked:
        gathered.notes.append(f"{len(leaked)} class images are held-out samples as well: {', '.join(leaked[:10])}")
    gathered.held_out = [s for s in gathered.training if s.id in chosen and not s.example.is_prior]
    gathered.stored_held_out = [s for s in gathered.stored if s.id in chosen and not s.example.is_prior]
    gathered.training = [s for s in gathered.training if s.example.is_prior or s.id not in chosen]
    gathered.stored = [s for s in gathered.stored if s.example.is_prior or s.id not in chosen]
