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
from qflux.data.dataset import Progress, SizedExample, gather
from qflux.data.images.index import FileIndex
from qflux.data.images.sizes import Transform
from qflux.data.sources.listing import Fault
from qflux.errors import DataError
from qflux.start.presets import FAMILIES


@dataclass(frozen=True)
class Seen:
    """What there is to train on."""

    samples: list[SizedExample]
    faults: list[Fault]

    @property
    def sides(self) -> list[float]:
        """Of squares as large as the targets, in ascending order."""
        return sorted(math.sqrt(sample.facts[0].width * sample.facts[0].height) for sample in self.samples)

    @property
    def sizes(self) -> str:
        """The smallest and the largest picture there is."""
        targets = sorted((s.facts[0] for s in self.samples), key=lambda fact: (fact.width * fact.height, fact.width))
        return " to ".join(dict.fromkeys(f"{fact.width}x{fact.height}" for fact in (targets[0], targets[-1])))

    @property
    def masks(self) -> int:
        return sum(sample.example.mask is not None for sample in self.samples)

    @property
    def has_controls(self) -> bool:
        return any(sample.example.controls for sample in self.samples)

    @property
    def prompt(self) -> str:
        """One of the prompts."""
        return self.samples[0].example.prompt

    def __str__(self) -> str:
        counts = sorted({len(sample.example.controls) for sample in self.samples})
        controls = "no control images"
        if counts != [0]:
            controls = f"{' or '.join(map(str, counts))} control image{'s' if counts[-1] > 1 else ''} each"
        return f"{len(self.samples)} samples, {self.sizes}, {controls}"


@dataclass(frozen=True)
class _Policy:
    """What a family says about control images, as far as that can be told without torch."""

    family: str

    def prompt_view(self, index: int, size: tuple[int, int], transform: Transform) -> Transform | None:
        return None

    def check_controls(self, count: int, what: str) -> None:
        if not _takes(self.family, count):
            fitting = next(name for name in FAMILIES if _takes(name, count))
            raise DataError(
                f"{what}: {count} control images; {self.family} does not take that many",
                f"--family {fitting} fits such data.",
            )


def _takes(family: str, count: int) -> bool:
    least, most = FAMILIES[family].controls
    return least <= count and (most is None or count <= most)


def look(source: dict[str, Any], rows: bytes, family: str, progress: Progress | None = None) -> Seen:
    """Look at the samples of a source. `rows` are of a table that is not written yet."""
    with TemporaryDirectory() as folder, _silent():
        looked = dict(source)
        if rows:
            looked |= {"path": f"{folder}/rows.jsonl", "root": str(Path(source["root"]).resolve())}
            Path(looked["path"]).write_bytes(rows)
        values = {"model": {"pretrained": "-"}, "data": {"sources": [looked], "on_bad_sample": "skip"}}
        index = FileIndex(Path(folder) / "index.jsonl")
        gathered = gather(load_config(values).data, _Policy(family), index, progress)
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
