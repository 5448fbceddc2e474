"""From listed samples to usable ones: facts of every image, transforms, ids; what trains and what is held out.

1. `_listed`        every source is listed
2. `FileIndex`      headers and hashes of all images, in parallel, each file once in its life
3. `_made`          every image of a sample gets its transform, from sizes alone
4. `_merged`        samples with equal content become one that trains as often as all of them
5. `_split`         held-out samples are set apart, chosen by content
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from qflux.config import CacheSource, DataSettings, Source
from qflux.data.images.decode import ImageFacts, ImageRef, shown
from qflux.data.images.index import FileIndex
from qflux.data.images.sizes import ImageProcessor, Transform
from qflux.data.sample import Sample, SampleImage, SampleImages, names
from qflux.data.sources import read_source
from qflux.data.sources.listing import Fault, ListedSample, Listing
from qflux.errors import DataError, collected
from qflux.files.hashing import key_of
from qflux.ragged.shapes import Shapes, token_shape

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

StoredReader = Callable[[CacheSource, bool], tuple[list[Sample], Listing]]
"""Lists a source of embeddings without images; the cache room knows how."""


class ImagePolicy(Protocol):
    """What a model family says about a sample's images."""

    @property
    def prompt_view(self) -> Callable[[int, tuple[int, int], Transform], Transform | None]:
        """How the text encoder sees a control: from its index, its own (width, height) and its transform."""

    @property
    def pixels_per_token(self) -> int:
        """Height and width in pixels of what a token stands for."""

    @property
    def size_multiple(self) -> int:
        """Heights and widths of images are multiples of this many pixels."""

    @property
    def has_alpha(self) -> bool:
        """Images have an opacity."""

    def check_controls(self, count: int, what: str) -> None:
        """A `DataError` if a sample can't have this many controls."""

    def check_prompts(self, second: str | None, what: str) -> None:
        """A `DataError` if a sample has a second prompt that nobody would read."""


@dataclass
class Dataset:
    """The samples of a config, and what is wrong with the rest."""

    training: list[Sample] = field(default_factory=list)
    """Those made from images in the order of their ids, then those that exist only as embeddings."""
    held_out: list[Sample] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    """What is left out, and why."""
    notes: list[str] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)

    @property
    def all(self) -> list[Sample]:
        return [*self.training, *self.held_out]

    @property
    def from_images(self) -> list[Sample]:
        """Those that can be encoded again."""
        return [sample for sample in self.all if sample.images is not None]

    def drop(self, sample: Sample, reason: str) -> None:
        """Leave a sample out."""
        self.training = [other for other in self.training if other is not sample]
        self.held_out = [other for other in self.held_out if other is not sample]
        self.faults.append(Fault(sample.name, reason, source=sample.source))


def gather(
    settings: DataSettings,
    policy: ImagePolicy,
    index: FileIndex,
    read_stored: StoredReader | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """The samples of a config, and everything that is wrong with the rest."""
    dataset = Dataset()
    stored: list[Sample] = []
    stored_apart: list[Sample] = []
    listings = _listed(settings.training_sources, read_stored, stored)
    listings += _listed(settings.class_sources, read_stored, stored, is_prior=True)
    apart_sources = settings.held_out.sources if settings.held_out and settings.held_out.sources else []
    apart = _listed(apart_sources, read_stored, stored_apart)
    dataset.listings = [*listings, *apart]
    for listing in dataset.listings:
        dataset.faults += listing.faults
        dataset.notes += listing.notes

    listed = [sample for listing in listings for sample in listing.samples]
    listed_apart = [sample for listing in apart for sample in listing.samples]
    made = _made([*listed, *listed_apart], settings, policy, index, dataset, progress)
    training = [sample for number, sample in made if number < len(listed)]
    held_out = [sample for number, sample in made if number >= len(listed)]
    dataset.training = [*_merged(training, dataset), *stored]
    dataset.held_out = [*_merged(held_out, dataset), *stored_apart]
    _split(settings, dataset)
    cropped = [s for s in dataset.all if s.images and s.images.crops_first_control]
    if cropped:
        dataset.notes.append(
            f"{len(cropped)} first controls have another aspect ratio than their target and are cropped to it: "
            + ", ".join(str(sample.own_images.controls[0].ref) for sample in cropped[:10])
        )
    return dataset


def require_usable(dataset: Dataset, settings: DataSettings) -> None:
    """Say what there is to say; an error for faults unless they may be skipped, and if nothing is left."""
    for note in dataset.notes:
        logger.warning("%s", note)
    sources = ", ".join(listing.source for listing in dataset.listings)
    if any(fault.is_fatal for fault in dataset.faults) or (dataset.faults and settings.on_bad_sample == "error"):
        remedies = dict.fromkeys(fault.remedy for fault in dataset.faults if fault.remedy)
        remedy = " ".join([*list(remedies)[:3], "data.on_bad_sample: skip leaves such samples out and names them."])
        raise collected(DataError, f"the data in {sources} is not all usable", list(map(str, dataset.faults)), remedy)
    for fault in dataset.faults:
        logger.warning("skipped: %s", fault)
    if not dataset.training:
        skipped = f"; {len(dataset.faults)} were skipped" if dataset.faults else ""
        raise DataError(f"no usable sample in {sources}{skipped}", "`qflux inspect` shows what is wrong with the data.")


def _listed(
    sources: Sequence[Source], read_stored: StoredReader | None, stored: list[Sample], is_prior: bool = False
) -> list[Listing]:
    """Every source's listing; samples that exist only as embeddings are put into `stored` as they are."""
    listings = []
    for source in sources:
        try:
            if isinstance(source, CacheSource):
                assert read_stored is not None, "this caller can't read embeddings"
                samples, listing = read_stored(source, is_prior)
                stored += samples
            else:
                listing = read_source(source, is_prior)
        except DataError as error:
            name = shown(source.path)
            listing = Listing(name, faults=[Fault(name, error.problem, error.remedy, name, is_fatal=True)])
        listings.append(listing)
    return listings


def _made(
    listed: Sequence[ListedSample],
    settings: DataSettings,
    policy: ImagePolicy,
    index: FileIndex,
    dataset: Dataset,
    progress: Progress | None,
) -> list[tuple[int, Sample]]:
    """Every usable sample with its number in the list; the others become faults."""
    images: list[ImageRef] = [ref for sample in listed for ref in sample.files]
    facts = iter(index.facts(images, progress))
    processor = ImageProcessor(settings.processor, policy.size_multiple)
    made = []
    for number, sample in enumerate(listed):
        found = [next(facts) for _ in sample.files]
        try:
            known = []
            for fact in found:
                if isinstance(fact, DataError):
                    raise fact
                known.append(fact)
            made.append((number, _make(sample, known, processor, policy)))
        except DataError as error:
            dataset.faults.append(Fault(sample.name, error.problem, error.remedy, sample.source))
    return made


def _make(listed: ListedSample, facts: Sequence[ImageFacts], processor: ImageProcessor, policy: ImagePolicy) -> Sample:
    """A sample with its transforms; `facts` are of `listed.files`."""
    of_target, of_controls = facts[0], facts[1 : 1 + len(listed.controls)]
    of_mask = facts[-1] if listed.mask else None
    policy.check_controls(len(listed.controls), str(listed.target))
    policy.check_prompts(listed.prompt_2, str(listed.target))
    transform = processor.target(*of_target.size, name=str(listed.target))
    controls = []
    for number, (ref, fact) in enumerate(zip(listed.controls, of_controls, strict=True)):
        own = processor.control(number, *fact.size, transform, str(ref))
        controls.append(SampleImage(ref, fact, own, policy.prompt_view(number, fact.size, own), policy.has_alpha))
    if of_mask and of_mask.size != of_target.size:
        sizes = " and ".join(f"{fact.width}x{fact.height}" for fact in (of_mask, of_target))
        raise DataError(
            f"{listed.mask}: the mask and its target differ in size: {sizes}", "give the mask the target's size."
        )
    images = SampleImages(
        SampleImage(listed.target, of_target, transform, has_alpha=policy.has_alpha),
        tuple(controls),
        listed.mask,
        of_mask.hash if of_mask else None,
    )
    worded: object = listed.prompt
    if listed.prompt_2 is not None or listed.further_captions:
        worded = [listed.prompt, listed.prompt_2, *listed.further_captions]
    content = key_of("id", [image.facts.hash for image in images.all], worded, images.mask_hash)
    grids = [token_shape(*image.transform.size, policy.pixels_per_token) for image in images.all]
    return Sample(
        id=key_of("class image", content) if listed.is_prior else content,
        name=listed.name,
        prompt=listed.prompt,
        shapes=Shapes(tuple(grids[:1]), tuple(grids[1:])),
        source=listed.source,
        place=str(listed.target),
        rate=listed.rate,
        is_prior=listed.is_prior,
        has_mask=listed.mask is not None,
        images=images,
        content=content,
        prompt_2=listed.prompt_2,
        further_captions=listed.further_captions,
    )


def _merged(samples: list[Sample], dataset: Dataset) -> list[Sample]:
    """One sample per content, sorted by id. Equal ones would share their noise; merged, each visit has its own."""
    unique: dict[tuple[str, bool], Sample] = {}
    repeated = []
    for sample in samples:
        key = (sample.id, sample.is_prior)
        first = unique.get(key)
        if first is None:
            unique[key] = sample
        else:
            repeated.append(f"{sample.name} = {first.name}")
            unique[key] = replace(first, rate=first.rate + sample.rate)
    if repeated:
        dataset.notes.append(
            f"{len(repeated)} samples are equal to another one and are merged with it, which then trains as often as "
            f"both: {', '.join(repeated[:10])}"
        )
    return sorted(unique.values(), key=lambda sample: (sample.id, sample.is_prior))


def _split(settings: DataSettings, dataset: Dataset) -> None:
    """Set held-out samples apart, by content and not by seed.

    A fraction is a threshold on a hash of each sample, so that adding samples moves none; a count takes the lowest.
    """
    held_out = settings.held_out
    if held_out is None:
        return
    if held_out.sources:
        ids = {sample.id for sample in dataset.training if sample.images}
        leaked = [sample for sample in dataset.held_out if sample.images and sample.id in ids]
        if leaked:
            dataset.notes.append(f"{len(leaked)} held-out samples are also trained on: {names(leaked, 10)}")
        return
    eligible = [sample for sample in dataset.training if not sample.is_prior]
    order = sorted(eligible, key=lambda sample: key_of("held out", sample.id))
    if held_out.fraction is not None:
        threshold = int(held_out.fraction * 16**15)
        below = {sample.id for sample in order if int(key_of("held out", sample.id)[:15], 16) < threshold}
        chosen = below or {sample.id for sample in order[:1]}
    else:
        chosen = {sample.id for sample in order[: held_out.count]}
    if len(chosen) >= len(eligible) > 0:
        problem = f"it takes {len(chosen)} of {len(eligible)} samples: none would be left to train on"
        dataset.faults.append(Fault("data.held_out", problem, "hold out fewer samples.", is_fatal=True))
        return
    leaked = [sample for sample in dataset.training if sample.is_prior and sample.content in chosen]
    if leaked:
        dataset.notes.append(f"{len(leaked)} class images are held-out samples as well: {names(leaked, 10)}")
    dataset.held_out = [s for s in dataset.training if s.id in chosen and not s.is_prior]
    dataset.training = [s for s in dataset.training if s.is_prior or s.id not in chosen]
