"""What is worth knowing about a data set: from headers, from looks at the images, from prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from qflux.data.lint import similarity
from qflux.data.lint.looks import Look
from qflux.data.lint.registration import Registration
from qflux.data.sample import Sample

Level = Literal["error", "warning", "note"]

_TURNED = {2: "mirrored", 3: "upside down", 4: "mirrored and upside down"}


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about the data."""

    level: Level
    """error: `cache` or `fit` would stop (or skip); warning: probably not meant; note: good to know."""
    kind: str
    what: str
    """The file or the sample."""
    detail: str


def of_headers(sample: Sample) -> Iterable[Finding]:
    """What the headers of a sample's images and their way to the training size say."""
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


def of_looks(samples: Sequence[Sample], looks: Sequence[Look]) -> Iterable[Finding]:
    """What is damaged, masks that say nothing, pairs that do not lie on each other."""
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
            yield from _of_registration(name, look.registration)


def _of_registration(name: str, found: Registration) -> Iterable[Finding]:
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


def of_likeness(samples: Sequence[Sample], looks: Sequence[Look]) -> Iterable[Finding]:
    """Copies, and pairs that seem to be crossed or reversed."""
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


def of_prompts(samples: Sequence[Sample], wanted: Sequence[int], limit: int, over_long: Level) -> Iterable[Finding]:
    """`wanted` are the tokens of each prompt as it was written; one beyond the limit is of the level `over_long`."""
    for sample, count in zip(samples, wanted, strict=True):
        if count > limit:
            detail = f"a prompt of {count} tokens; the limit is {limit}"
            yield Finding(over_long, "over-long prompt", sample.name, detail)
    by_prompt: dict[str, list[str]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.prompt].append(sample.name)
    for prompt, called in by_prompt.items():
        if len(called) > 1:
            detail = f"{len(called)} samples have the prompt {prompt[:60]!r}: {', '.join(called[:5])}"
            yield Finding("note", "same prompt", called[0], detail)
