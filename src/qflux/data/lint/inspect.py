"""What is in the data, and what will become of it. Nothing is changed; nothing that is wrong stops the look.

1. `gather`       sources, headers, transforms: everything `cache` would stumble over
2. `look_at`      every image decoded once, small: damage, masks, alignment
3. `findings`     what headers, looks, images beside each other and prompts say
4. `TrainingPlan` steps per epoch, and the padding of a padded run
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from qflux.config import Config
from qflux.data.dataset import Dataset, ImagePolicy, StoredReader, gather
from qflux.data.images.index import FileIndex
from qflux.data.lint.findings import Finding, Level, of_headers, of_likeness, of_looks, of_prompts
from qflux.data.lint.looks import look_at
from qflux.data.noises import Noises
from qflux.data.plan import Batching, EpochPlan
from qflux.data.sample import Sample
from qflux.models.registry import described, facts_of
from qflux.ragged.layout import padding_ratio

_MOST_STEPS = 500
"""Steps of an epoch that the padding of a padded run is taken from."""


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
    findings += [finding for sample in samples for finding in of_headers(sample)]
    looks = look_at(samples, lambda done, total: report("images", done, total))
    findings += of_looks(samples, looks)
    findings += of_likeness(samples, looks)

    lengths = [text_length(sample) for sample in samples]
    over_long: Level = "error" if config.model.on_long_prompt == "error" else "warning"
    findings += of_prompts(samples, [wanted for _, wanted in lengths], text_limit, over_long)
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
