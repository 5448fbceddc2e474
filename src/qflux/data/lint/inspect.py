"""What is in the data, and what will become of it. Nothing is changed; nothing that is wrong stops the look.

1. `gather`       sources, headers, transforms: everything `cache` would stumble over
2. `_look`        every image decoded once, small: damage, masks, alignment
3. `similarity`     images beside each other: copies, crossed and reversed pairs
4. `_prompts`     duplicate and over-long prompts
5. `TrainingPlan` steps per epoch, and the padding of a padded run
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from qflux.config import Config
from qflux.data.dataset import Dataset, ImagePolicy, StoredReader, gather
from qflux.data.images.decode import ImageRef, load_mask, load_small
from qflux.data.images.index import FileIndex, in_parallel
from qflux.data.lint import similarity
from qflux.data.lint.alignment import THUMBNAIL, Shift, shift_between
from qflux.data.lint.registration import Registration, measured
from qflux.data.noises import Noises
from qflux.data.plan import Batching, EpochPlan
from qflux.data.sample import Sample
from qflux.errors import DataError
from qflux.models.registry import described, facts_of
from qflux.ragged.layout import padding_ratio

Level = Literal["error", "warning", "note"]

_TURNED = {2: "mirrored", 3: "upside down", 4: "mirrored and upside down"}
_CLOSELY, _SIDE = 500, 384
"""So many pairs are looked at closely, spread over all, at a longer side of so many pixels."""
_MOST_STEPS = 500
"""Steps of an epoch that the padding of a padded run is taken from."""


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about the data."""

    level: Level
    """error: `cache` or `fit` would stop (or skip); warning: probably not meant; note: good to know."""
    kind: str
    what: str
    """The file or the sample."""
    detail: str


@dataclass(frozen=True)
class SourceSummary:
    """One source."""

    name: str
    samples: int
    faults: int
    visits: float
    """Per epoch."""


@dataclass
class Inspection:
    """Everything `qflux inspect` knows."""

    sources: list[SourceSummary]
    training: int
    held_out: int
    class_images: int
    megapixels: dict[str, int] = field(default_factory=dict)
    """Targets by their own size."""
    aspects: dict[str, int] = field(default_factory=dict)
    """Targets by width / height."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Targets by the size they train at, width x height."""
    controls: dict[str, int] = field(default_factory=dict)
    """Samples by their number of controls."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Per sample, text and images: least, quartiles, most."""
    text_is_estimated: bool = False
    steps_per_epoch: int = 0
    samples_per_step: float = 0.0
    padding: float = 0.0
    """The share of a padded run that would be spent on padding."""
    findings: list[Finding] = field(default_factory=list)

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    def dump(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Inspected:
    """A summary, and what pictures of it need."""

    summary: Inspection
    dataset: Dataset
    samples: list[Sample]
    """Those made from images, with the length of their prompts: what trains, then what is held out."""
    plan: EpochPlan | None
    """The first epoch, if there is anything to train on; it speaks of `samples` by their numbers."""

    @property
    def batches(self) -> Iterator[list[Sample]]:
        """The micro-batches of the first epoch."""
        for step in self.plan or ():
            for rank in step.ranks:
                yield from ([self.samples[visit.sample] for visit in batch] for batch in rank if batch)


@dataclass
class _Look:
    """What decoding a sample's images showed."""

    damaged: list[DataError] = field(default_factory=list)
    target: Any = None
    control: Any = None
    target_features: Any = None
    control_features: Any = None
    shift: Shift | None = None
    registration: Registration | None = None
    mask: tuple[float, float] | None = None
    """Least and most of a mask, in [0, 1]."""


LengthOf = Callable[[Sample], tuple[int, int]]
"""Text tokens of a sample: those the transformer sees, and those its prompt wants."""


def inspect(
    config: Config,
    policy: ImagePolicy,
    index: FileIndex,
    text_length: LengthOf,
    text_limit: int,
    read_stored: StoredReader | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Inspected:
    """A look at the data of a config."""
    report = progress or (lambda stage, done, total: None)
    headers = lambda done, total: report("headers", done, total)  # noqa: E731
    dataset = gather(config.data, policy, index, read_stored, headers)
    training = [sample for sample in dataset.training if sample.images]
    held_out = [sample for sample in dataset.held_out if sample.images]
    samples = [*training, *held_out]
    inspection = Inspection(
        sources=_sources(dataset),
        training=sum(not sample.is_prior for sample in training),
        held_out=len(held_out),
        class_images=sum(sample.is_prior for sample in training),
    )
    findings = inspection.findings
    findings += [Finding("error", "unusable", fault.what, fault.problem) for fault in dataset.faults]
    findings += [Finding("note", "data", "", note) for note in dataset.notes]
    for sample in samples:
        findings += _header_findings(sample)

    looks: list[_Look] = []
    closely = {id(sample) for sample in samples[:: -(-len(samples) // _CLOSELY) or 1]}
    # A thread a core: they compute, and more of them would only wait for each other.
    for look in in_parallel(lambda sample: _look(sample, id(sample) in closely), samples, os.cpu_count() or 1):
        looks.append(look)
        report("images", len(looks), len(samples))
    findings += _look_findings(samples, looks)
    findings += _likeness_findings(samples, looks)

    lengths = [text_length(sample) for sample in samples]
    findings += _prompts(samples, [wanted for _, wanted in lengths], text_limit, config)
    samples = [replace(s, text_tokens=used) for s, (used, _) in zip(samples, lengths, strict=True)]
    _describe(inspection, samples)
    damaged = [bool(look.damaged) for look in looks]
    _count_damaged(inspection, samples, damaged)
    plan = _describe_plan(inspection, samples[: len(training)], damaged, config)
    order = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda finding: (order[finding.level], finding.kind))
    return Inspected(inspection, dataset, samples, plan)


def _sources(dataset: Dataset) -> list[SourceSummary]:
    used = Counter(sample.source for sample in dataset.from_images)
    faults = Counter(fault.source for fault in dataset.faults)
    trained = [sample for sample in dataset.training if sample.images]
    return [
        SourceSummary(
            listing.source,
            used[listing.source],
            faults[listing.source],
            sum(sample.rate for sample in trained if sample.source == listing.source),
        )
        for listing in dataset.listings
    ]


def _header_findings(sample: Sample) -> Iterable[Finding]:
    images = sample.own_images
    for image in images.all:
        name, facts, transform = str(image.ref), image.facts, image.transform
        if facts.orientation != 1:
            turn = _TURNED.get(facts.orientation, "on its side")
            yield Finding("note", "orientation", name, f"stored {turn} (EXIF); it is turned upright")
        if facts.deep:
            yield Finding("note", "pixel format", name, "more than 8 bits a channel; scaled to 8")
        if facts.mode in ("CMYK", "YCCK", "LAB"):
            yield Finding("note", "pixel format", name, f"{facts.mode}, converted to RGB without a colour profile")
        if facts.mode in ("RGBA", "LA", "PA") and not image.has_alpha:
            yield Finding("note", "pixel format", name, "transparent; composited onto white")
        left, top, right, bottom = transform.box(*facts.size)
        enlarged = transform.size[1] / (right - left)
        if enlarged > 1.5:
            height, width = transform.size
            detail = f"{facts.width}x{facts.height} is enlarged {enlarged:.1f} times, to {width}x{height}"
            yield Finding("warning", "enlarged", name, detail)
        lost = 1 - (right - left) * (bottom - top) / (facts.width * facts.height)
        if lost > 0.1:
            yield Finding("warning", "cropped", name, f"{lost:.0%} of it is cropped away")
    if images.controls and images.controls[0].facts.hash == images.target.facts.hash:
        detail = "control and target are the same image: there is nothing to learn"
        yield Finding("warning", "no edit", sample.name, detail)


def _look(sample: Sample, closely: bool) -> _Look:
    look, images = _Look(), sample.own_images
    small = [_small(image.ref, look) for image in images.all]
    if small[0] is not None:
        look.target, look.target_features = similarity.thumbnail(small[0]), similarity.features(small[0])
    if len(small) > 1 and small[1] is not None:
        look.control, look.control_features = similarity.thumbnail(small[1]), similarity.features(small[1])
        if small[0] is not None:
            look.shift = shift_between(small[1], small[0])
            look.registration = measured(sample, _SIDE) if closely and not look.shift.is_suspect else None
    if images.mask:
        try:
            values = np.asarray(load_mask(images.mask)) / 255
            look.mask = float(values.min()), float(values.max())
        except DataError as error:
            look.damaged.append(error)
    return look


def _small(ref: ImageRef, look: _Look) -> Any:
    try:
        return load_small(ref, THUMBNAIL)
    except DataError as error:
        look.damaged.append(error)
        return None


def _look_findings(samples: Sequence[Sample], looks: Sequence[_Look]) -> Iterable[Finding]:
    for sample, look in zip(samples, looks, strict=True):
        name = sample.name
        for error in look.damaged:
            yield Finding("error", "unusable", name, error.problem)
        if look.mask and look.mask[1] < 0.01:
            yield Finding("warning", "mask", str(sample.own_images.mask), "the mask is empty: nothing counts as edited")
        if look.mask and look.mask[0] > 0.99:
            yield Finding(
                "warning", "mask", str(sample.own_images.mask), "the mask is full: everything counts as edited"
            )
        if look.shift and look.shift.is_suspect:
            shift = look.shift
            detail = (
                f"control and target look unaligned: shifted by {shift.right:+.0%} of the width and "
                f"{shift.down:+.0%} of the height they fit better"
            )
            yield Finding("warning", "unaligned", name, detail)
        if look.registration:
            yield from _registration_findings(name, look.registration)


def _registration_findings(name: str, found: Registration) -> Iterable[Finding]:
    if max(abs(found.down), abs(found.right)) > 0.5 or abs(found.zoom - 1) > 0.002:
        detail = (
            f"the target lies {found.right:+.1f} pixels right of its control and {found.down:+.1f} below, and is "
            f"{100 * (found.zoom - 1):+.2f} % larger; `qflux inspect --fix FOLDER` writes registered copies"
        )
        yield Finding("warning", "off by pixels", name, detail)
    if found.has_cast:
        lightness, red, yellow = found.cast
        detail = (
            f"what the edit leaves alone is of another colour: lightness {lightness:+.1f}, red {red:+.1f}, yellow "
            f"{yellow:+.1f} (Lab)"
        )
        yield Finding("note", "colour cast", name, detail)


def _likeness_findings(samples: Sequence[Sample], looks: Sequence[_Look]) -> Iterable[Finding]:
    by_hash: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_hash[_target_hash(sample)].append(sample)
    for group in by_hash.values():
        if len(group) > 1:
            listed = ", ".join(sample.place for sample in group[:5])
            yield Finding("warning", "duplicate", group[0].place, f"{len(group)} equal targets: {listed}")

    seen = [i for i, look in enumerate(looks) if look.target is not None]
    for members in similarity.copies([looks[i].target for i in seen]) if seen else ():
        alike = sorted({_target_hash(samples[seen[i]]): samples[seen[i]] for i in members}.values(), key=_place)
        if len(alike) > 1:
            listed = ", ".join(map(_place, alike[1:6]))
            detail = f"looks the same as {listed}" + (f" and {len(alike) - 6} others" if len(alike) > 6 else "")
            yield Finding("warning", "near-duplicate", _place(alike[0]), detail)

    pairs = [i for i in seen if looks[i].control is not None]
    if not pairs:
        return
    if len(pairs) > similarity.MOST_PAIRS:
        detail = (
            f"only the first {similarity.MOST_PAIRS:,} of {len(pairs):,} pairs were looked at for mixed-up controls"
        )
        yield Finding("note", "not looked at", "", detail)
    for first, second in similarity.crossed([looks[i].control for i in pairs], [looks[i].target for i in pairs]):
        a, b = samples[pairs[first]], samples[pairs[second]]
        detail = f"its control looks like the target of {b.name}: are the pairs mixed up?"
        yield Finding("warning", "swapped", a.name, detail)
    changed = similarity.reversed_edits(
        [looks[i].control_features for i in pairs], [looks[i].target_features for i in pairs]
    )
    for position in changed:
        detail = "its edit goes the other way than nearly all others: are control and target swapped?"
        yield Finding("warning", "swapped", samples[pairs[position]].name, detail)


def _place(sample: Sample) -> str:
    return sample.place


def _target_hash(sample: Sample) -> str:
    return sample.own_images.target.facts.hash


def _prompts(samples: Sequence[Sample], wanted: Sequence[int], limit: int, config: Config) -> Iterable[Finding]:
    for sample, count in zip(samples, wanted, strict=True):
        if count > limit:
            level: Level = "error" if config.model.on_long_prompt == "error" else "warning"
            detail = f"a prompt of {count} tokens; the limit is {limit}"
            yield Finding(level, "over-long prompt", sample.name, detail)
    by_prompt: dict[str, list[str]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.prompt].append(sample.name)
    for prompt, called in by_prompt.items():
        if len(called) > 1:
            detail = f"{len(called)} samples have the prompt {prompt[:60]!r}: {', '.join(called[:5])}"
            yield Finding("note", "same prompt", called[0], detail)


def _describe(inspection: Inspection, samples: Sequence[Sample]) -> None:
    targets = [sample.own_images.target for sample in samples]
    facts = [image.facts for image in targets]
    inspection.megapixels = _histogram([f.width * f.height / 1e6 for f in facts], (0.1, 0.25, 0.5, 1, 2, 4, 8), " MP")
    inspection.aspects = _histogram([f.width / f.height for f in facts], (1 / 3, 0.5, 0.75, 1, 1.34, 2, 3), "")
    sizes = Counter("{}x{}".format(*image.transform.size[::-1]) for image in targets)
    inspection.sizes = dict(sizes.most_common())
    counts = Counter(len(sample.own_images.controls) for sample in samples)
    inspection.controls = {str(number): count for number, count in sorted(counts.items())}
    if samples:
        quartiles = np.quantile([sample.tokens for sample in samples], (0, 0.25, 0.5, 0.75, 1), method="nearest")
        inspection.tokens = dict(
            zip(("least", "quarter", "median", "three quarters", "most"), map(int, quartiles), strict=True)
        )


def _histogram(values: Sequence[float], edges: Sequence[float], unit: str) -> dict[str, int]:
    """Counts between the edges; empty ends are left out."""
    labels = [f"up to {edges[0]:.3g}{unit}"]
    labels += [f"{low:.3g} to {high:.3g}{unit}" for low, high in pairwise(edges)]
    labels.append(f"over {edges[-1]:.3g}{unit}")
    counts = Counter(int(np.searchsorted(edges, value)) for value in values)
    used = sorted(counts)
    return {labels[i]: counts[i] for i in range(used[0], used[-1] + 1)} if used else {}


def _count_damaged(inspection: Inspection, samples: Sequence[Sample], damaged: Sequence[bool]) -> None:
    """Samples of which an image can't be decoded are not trained on either."""
    for number, (sample, is_damaged) in enumerate(zip(samples, damaged, strict=True)):
        if not is_damaged:
            continue
        for i, source in enumerate(inspection.sources):
            if source.name == sample.source:
                rest = source.visits - (sample.rate if number < len(samples) - inspection.held_out else 0)
                inspection.sources[i] = replace(
                    source, samples=source.samples - 1, faults=source.faults + 1, visits=rest
                )


def _describe_plan(
    inspection: Inspection, training: Sequence[Sample], damaged: Sequence[bool], config: Config
) -> EpochPlan | None:
    budget = config.data.max_tokens
    usable = [sample for sample, broken in zip(training, damaged, strict=False) if not broken]
    inspection.training = sum(not sample.is_prior for sample in usable)
    inspection.class_images = len(usable) - inspection.training
    noises = Noises.of(config)
    large = [sample for sample in usable if budget and noises.tokens(sample) > budget]
    for sample in large:
        drawn = f" with {noises.per_visit} noises" if noises.per_visit > 1 else ""
        detail = f"{noises.tokens(sample)} tokens{drawn}, more than data.max_tokens {budget}"
        inspection.findings.append(Finding("error", "too large", sample.name, detail))
    if not usable or large:
        return None
    # A damaged sample keeps its place, so that the plan speaks of samples by their numbers, and is never due.
    rates = [0.0 if broken else sample.rate for sample, broken in zip(training, damaged, strict=False)]
    lengths = [noises.tokens(sample) for sample in training]
    attention_tokens = facts_of(config.family).of(described(config.model.pretrained)).attention_tokens
    plan = EpochPlan(lengths, Batching.of(config, attention_tokens=attention_tokens), config.seed, rates=rates)
    if not len(plan):
        return None
    inspection.steps_per_epoch = len(plan)
    inspection.samples_per_step = sum(step.samples for step in plan) / len(plan)
    steps = [plan[i] for i in range(0, len(plan), max(1, len(plan) // _MOST_STEPS))]
    batches = [[lengths[v.sample] for v in batch] for step in steps for rank in step.ranks for batch in rank if batch]
    inspection.padding = padding_ratio(*batches)
    return plan
