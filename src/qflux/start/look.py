"""What a source's samples are like, from the headers of their images."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qflux.config import load_config
from qflux.data.dataset import Progress, gather
from qflux.data.images.decode import ImageFacts
from qflux.data.images.index import FileIndex
from qflux.data.images.sizes import Transform
from qflux.data.sample import Sample
from qflux.data.sources.listing import Fault
from qflux.errors import DataError
from qflux.models.facts import Facts
from qflux.models.registry import all_facts, facts_of


@dataclass(frozen=True)
class Seen:
    """What there is to train on."""

    samples: list[Sample]
    faults: list[Fault]

    @property
    def sides(self) -> list[float]:
        """Of squares as large as the targets, in ascending order."""
        return sorted(math.sqrt(_target(sample).width * _target(sample).height) for sample in self.samples)

    @property
    def sizes(self) -> str:
        """The smallest and the largest picture there is."""
        targets = sorted(map(_target, self.samples), key=lambda fact: (fact.width * fact.height, fact.width))
        return " to ".join(dict.fromkeys(f"{fact.width}x{fact.height}" for fact in (targets[0], targets[-1])))

    @property
    def masks(self) -> int:
        return sum(sample.has_mask for sample in self.samples)

    @property
    def has_controls(self) -> bool:
        return any(sample.shapes.controls for sample in self.samples)

    @property
    def prompt(self) -> str:
        """One of the prompts."""
        return self.samples[0].prompt

    def __str__(self) -> str:
        counts = sorted({len(sample.shapes.controls) for sample in self.samples})
        controls = "no control images"
        if counts != [0]:
            controls = f"{' or '.join(map(str, counts))} control image{'s' if counts[-1] > 1 else ''} each"
        return f"{len(self.samples)} samples, {self.sizes}, {controls}"


def _target(sample: Sample) -> ImageFacts:
    return sample.own_images.target.facts


@dataclass(frozen=True)
class _Policy:
    """What a family says about a sample's images, as far as that can be told without torch."""

    facts: Facts

    @property
    def pixels_per_token(self) -> int:
        return self.facts.pixels_per_token

    @property
    def size_multiple(self) -> int:
        return self.facts.size_multiple

    @property
    def has_alpha(self) -> bool:
        return self.facts.has_alpha

    def prompt_view(self, index: int, size: tuple[int, int], transform: Transform) -> Transform | None:
        return None

    def check_controls(self, count: int, what: str) -> None:
        fitting = next((facts.name for facts in all_facts() if facts.takes(count)), None)
        self.facts.check_controls(count, what, f"--family {fitting} fits such data." if fitting else "")

    def check_prompts(self, second: str | None, what: str) -> None:
        self.facts.check_prompts(second, what)


def look(source: dict[str, Any], rows: bytes, family: str, progress: Progress | None = None) -> Seen:
    """Look at the samples of a source. `rows` are of a table that is not written yet."""
    with TemporaryDirectory() as folder, _silent():
        looked = dict(source)
        if rows:
            looked |= {"path": f"{folder}/rows.jsonl", "root": str(Path(source["root"]).resolve())}
            Path(looked["path"]).write_bytes(rows)
        values = {"model": {"pretrained": "-"}, "data": {"sources": [looked], "on_bad_sample": "skip"}}
        index = FileIndex(Path(folder) / "index.jsonl")
        gathered = gather(load_config(values).data, _Policy(facts_of(family)), index, progress=progress)
    if not gathered.all:
        problems = "".join(f"\n  - {fault}" for fault in gathered.faults[:10]) or " it holds no row"
        remedies = dict.fromkeys(fault.remedy for fault in gathered.faults if fault.remedy)
        raise DataError(
            f"no sample of {source.get('root') or source['path']} can be used by {family}:{problems}",
            " ".join(list(remedies)[:3]) or "fix them first.",
        )
    return Seen(gathered.all, gathered.faults)


@contextmanager
def _silent() -> Iterator[None]:
    """What there is to warn of, `check` and `inspect` say."""
    logger = logging.getLogger("qflux")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
