"""What is in the data, and what will become of it. Nothing is changed; nothing that is wrong stops the look.

1. `gather`       sources, headers, transforms: everything `cache` would stumble over
2. `_look`        every image decoded once, small: damage, masks, alignment
3. `similarity`     images beside each other: copies, crossed and reversed pairs
4. `_prompts`     duplicate and over-long prompts
5. `TrainingPlan` steps per epoch, and the padding of a padded run
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from qflux.config import Config
from qflux.data.dataset import ImagePolicy, SampleSet, SizedExample, gather
from qflux.data.images.decode import ImageFacts, ImageRef, load_mask, load_small
from qflux.data.images.index import FileIndex, in_parallel
from qflux.data.lint import similarity
from qflux.data.plan import Batching, EpochPlan
from qflux.errors import DataError
from qflux.ragged.layout import padding_ratio

Level = Literal["error", "warning", "note"]

_TURNED = {2: "mirrored", 3: "upside down", 4: "mirrored and upside down"}
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
    samples: SampleSet
    text_tokens: list[int]
    """Of every sample, in the order of `samples.all`."""
    plan: EpochPlan | None
    """The first epoch, if there is anything to train on."""


@dataclass
class _Look:
    """What decoding a sample's images showed."""

    damaged: list[DataError] = field(default_factory=list)
    target: Any = None
    control: Any = None
    target_features: Any = None
    control_features: Any = None
    shift: similarity.Shift | None = None
    mask: tuple[float, float] | None = None
    """Least and most of a mask, in [0, 1]."""


LengthOf = Callable[[SizedExample], tuple[int, int]]
"""Text tokens of a sample: those the transformer sees, and those its prompt wants."""


def inspect(
    config: Config,
    policy: ImagePolicy,
    index: FileIndex,
    text_length: LengthOf,
    text_limit: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> Inspected:
    """A look at the data of a config."""
    report = progress or (lambda stage, done, total: None)
    gathered = gather(config.data, policy, index, lambda done, total: report("headers", done, total))
    samples = gathered.all
    inspection = Inspection(
        sources=_sources(gathered),
        training=sum(not sample.example.is_prior for sample in gathered.training),
        held_out=len(gathered.held_out),
        class_images=sum(sample.example.is_prior for sample in gathered.training),
    )
    findings = inspection.findings
    findings += [Finding("error", "unusable", fault.what, fault.problem) for fault in gathered.faults]
    findings += [Finding("note", "data", "", note) for note in gathered.notes]
    for sample in samples:
        findings += _header_findings(sample)

    looks: list[_Look] = []
    for look in in_parallel(_look, samples):
        looks.append(look)
        report("images", len(looks), len(samples))
    findings += _look_findings(samples, looks)
    findings += _likeness_findings(samples, looks)

    lengths = [text_length(sample) for sample in samples]
    findings += _prompts(samples, [wanted for _, wanted in lengths], text_limit, config)
    totals = [used + sample.image_tokens for (used, _), sample in zip(lengths, samples, strict=True)]
    _describe(inspection, samples, totals)
    damaged = [bool(look.damaged) for look in looks]
    _count_damaged(inspection, samples, damaged)
    plan = _describe_plan(inspection, gathered.training, totals, damaged, config)
    order = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda finding: (order[finding.level], finding.kind))
    return Inspected(inspection, gathered, [used for used, _ in lengths], plan)


def _sources(gathered: SampleSet) -> list[SourceSummary]:
    used = Counter(sample.example.source for sample in gathered.all)
    faults = Counter(fault.source for fault in gathered.faults)
    return [
        SourceSummary(
            listing.source,
            used[listing.source],
            faults[listing.source],
            sum(s.example.rate for s in gathered.training if s.example.source == listing.source),
        )
        for listing in gathered.listings
    ]


def _header_findings(sample: SizedExample) -> Iterable[Finding]:
    for ref, facts, transform in zip(sample.example.images, sample.facts, sample.transforms, strict=True):
        name = str(ref)
        if facts.orientation != 1:
            turn = _TURNED.get(facts.orientation, "on its side")
            yield Finding("note", "orientation", name, f"stored {turn} (EXIF); it is turned upright")
        if facts.deep:
            yield Finding("note", "pixel format", name, "more than 8 bits a channel; scaled to 8")
        if facts.mode in ("CMYK", "YCCK", "LAB"):
            yield Finding("note", "pixel format", name, f"{facts.mode}, converted to RGB without a colour profile")
        if facts.mode in ("RGBA", "LA", "PA"):
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
    if len(sample.facts) > 1 and sample.facts[0].hash == sample.facts[1].hash:
        yield Finding(
            "warning",
            "no edit",
            sample.example.name,
            "control and target are the same image: there is nothing to learn",
        )


def _look(sample: SizedExample) -> _Look:
    look = _Look()
    small = [_small(ref, look) for ref in sample.example.images]
    if small[0] is not None:
        look.target, look.target_features = similarity.thumbnail(small[0]), similarity.features(small[0])
    if len(small) > 1 and small[1] is not None:
        look.control, look.control_features = similarity.thumbnail(small[1]), similarity.features(small[1])
        if small[0] is not None:
            look.shift = similarity.shift_between(small[1], small[0])
    if sample.example.mask:
        try:
            values = np.asarray(load_mask(sample.example.mask)) / 255
            look.mask = float(values.min()), float(values.max())
        except DataError as error:
            look.damaged.append(error)
    return look


def _small(ref: ImageRef, look: _Look) -> Any:
    try:
        return load_small(ref, similarity.SIDE)
    except DataError as error:
        look.damaged.append(error)
        return None


def _look_findings(samples: Sequence[SizedExample], looks: Sequence[_Look]) -> Iterable[Finding]:
    for sample, look in zip(samples, looks, strict=True):
        name = sample.example.name
        for error in look.damaged:
            yield Finding("error", "unusable", name, error.problem)
        if look.mask and look.mask[1] < 0.01:
            yield Finding("warning", "mask", str(sample.example.mask), "the mask is empty: nothing counts as edited")
        if look.mask and look.mask[0] > 0.99:
            yield Finding("warning", "mask", str(sample.example.mask), "the mask is full: everything counts as edited")
        if look.shift and look.shift.is_suspect:
            shift = look.shift
            detail = (
                f"control and target look unaligned: shifted by {shift.right:+.0%} of the width and "
                f"{shift.down:+.0%} of the height they fit better"
            )
            yield Finding("warning", "unaligned", name, detail)


def _likeness_findings(samples: Sequence[SizedExample], looks: Sequence[_Look]) -> Iterable[Finding]:
    by_hash: dict[str, list[SizedExample]] = defaultdict(list)
    for sample in samples:
        by_hash[sample.facts[0].hash].append(sample)
    for group in by_hash.values():
        if len(group) > 1:
            names = ", ".join(str(sample.example.target) for sample in group[:5])
            yield Finding("warning", "duplicate", str(group[0].example.target), f"{len(group)} equal targets: {names}")

    seen = [i for i, look in enumerate(looks) if look.target is not None]
    for members in similarity.copies([looks[i].target for i in seen]) if seen else ():
        alike = sorted({samples[seen[i]].facts[0].hash: samples[seen[i]] for i in members}.values(), key=_target_name)
        if len(alike) > 1:
            names = ", ".join(map(_target_name, alike[1:6]))
            detail = f"looks the same as {names}" + (f" and {len(alike) - 6} others" if len(alike) > 6 else "")
            yield Finding("warning", "near-duplicate", _target_name(alike[0]), detail)

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
        detail = f"its control looks like the target of {b.example.name}: are the pairs mixed up?"
        yield Finding("warning", "swapped", a.example.name, detail)
    changed = similarity.reversed_edits(
        [looks[i].control_features for i in pairs], [looks[i].target_features for i in pairs]
    )
    for position in changed:
        detail = "its edit goes the other way than nearly all others: are control and target swapped?"
        yield Finding("warning", "swapped", samples[pairs[position]].example.name, detail)


def _target_name(sample: SizedExample) -> str:
    return str(sample.example.target)


def _prompts(samples: Sequence[SizedExample], wanted: Sequence[int], limit: int, config: Config) -> Iterable[Finding]:
    for sample, count in zip(samples, wanted, strict=True):
        if count > limit:
            level: Level = "error" if config.model.on_long_prompt == "error" else "warning"
            detail = f"a prompt of {count} tokens; the limit is {limit}"
            yield Finding(level, "over-long prompt", sample.example.name, detail)
    by_prompt: dict[str, list[str]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.example.prompt].append(sample.example.name)
    for prompt, names in by_prompt.items():
        if len(names) > 1:
            detail = f"{len(names)} samples have the prompt {prompt[:60]!r}: {', '.join(names[:5])}"
            yield Finding("note", "same prompt", names[0], detail)


def _describe(inspection: Inspection, samples: Sequence[SizedExample], totals: Sequence[int]) -> None:
    targets: list[ImageFacts] = [sample.facts[0] for sample in samples]
    inspection.megapixels = _histogram([f.width * f.height / 1e6 for f in targets], (0.1, 0.25, 0.5, 1, 2, 4, 8), " MP")
    inspection.aspects = _histogram([f.width / f.height for f in targets], (1 / 3, 0.5, 0.75, 1, 1.34, 2, 3), "")
    sizes = Counter("{}x{}".format(*sample.transforms[0].size[::-1]) for sample in samples)
    inspection.sizes = dict(sizes.most_common())
    inspection.controls = {
        str(n): count for n, count in sorted(Counter(len(s.example.controls) for s in samples).items())
    }
    if totals:
        quartiles = np.quantile(totals, (0, 0.25, 0.5, 0.75, 1), method="nearest")
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


def _count_damaged(inspection: Inspection, samples: Sequence[SizedExample], damaged: Sequence[bool]) -> None:
    """Samples of which an image can't be decoded are not trained on either."""
    for number, (sample, is_damaged) in enumerate(zip(samples, damaged, strict=True)):
        if not is_damaged:
            continue
        for i, source in enumerate(inspection.sources):
            if source.name == sample.example.source:
                rest = source.visits - (sample.example.rate if number < len(samples) - inspection.held_out else 0)
                inspection.sources[i] = replace(
                    source, samples=source.samples - 1, faults=source.faults + 1, visits=rest
                )


def _describe_plan(
    inspection: Inspection,
    training: Sequence[SizedExample],
    totals: Sequence[int],
    damaged: Sequence[bool],
    config: Config,
) -> EpochPlan | None:
    budget = config.data.max_tokens
    usable = [(s, n) for s, n, broken in zip(training, totals, damaged, strict=False) if not broken]
    inspection.training = sum(not sample.example.is_prior for sample, _ in usable)
    inspection.class_images = len(usable) - inspection.training
    large = [(sample, count) for sample, count in usable if budget and count > budget]
    for sample, count in large:
        detail = f"{count} tokens, more than data.max_tokens {budget}"
        inspection.findings.append(Finding("error", "too large", sample.example.name, detail))
    if not usable or large:
        return None
    # A damaged sample keeps its place, so that the plan speaks of samples by their numbers, and is never due.
    rates = [0.0 if broken else s.example.rate for s, broken in zip(training, damaged, strict=False)]
    plan = EpochPlan(totals[: len(training)], Batching.of(config), config.seed, rates=rates)
    if not len(plan):
        return None
    inspection.steps_per_epoch = len(plan)
    inspection.samples_per_step = sum(step.samples for step in plan) / len(plan)
    steps = [plan[i] for i in range(0, len(plan), max(1, len(plan) // _MOST_STEPS))]
    batches = [[totals[v.sample] for v in batch] for step in steps for rank in step.ranks for batch in rank if batch]
    inspection.padding = padding_ratio(*batches)
    return plan
