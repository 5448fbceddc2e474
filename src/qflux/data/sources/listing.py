"""What a source lists: samples by name and path, nothing opened, and what is wrong with the others."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qflux.config import Section
from qflux.data.images.decode import ImageRef
from qflux.errors import DataError


@dataclass(frozen=True)
class ListedSample:
    """A sample as a source names it: the wanted image, the images it is made from, and the instruction."""

    name: str
    target: ImageRef
    prompt: str
    controls: tuple[ImageRef, ...] = ()
    mask: ImageRef | None = None
    source: str = ""
    """Which source it comes from, as messages name it."""
    rate: float = 1.0
    """Visits per epoch."""
    is_prior: bool = False
    """A class image, for prior preservation."""
    place: str = ""
    """The row of a table that it is from."""
    prompt_2: str | None = None
    """What a second text encoder reads instead of the prompt."""
    further_captions: tuple[str, ...] = ()
    """Other wordings of the prompt."""

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """Target and controls, in the order of their tokens."""
        return (self.target, *self.controls)

    @property
    def files(self) -> tuple[ImageRef, ...]:
        """Everything that has to be looked at: the images, then the mask."""
        return (*self.images, *([self.mask] if self.mask else []))


@dataclass(frozen=True)
class Fault:
    """Why something in a source can't be used."""

    what: str
    """The file, or the row of a table."""
    problem: str
    remedy: str = ""
    source: str = ""
    is_fatal: bool = False
    """Not a sample but a whole source, or the config: it can't be skipped."""

    def __str__(self) -> str:
        return f"{self.what}: {self.problem}"


@dataclass
class Listing:
    """What a source holds: samples, and what is wrong with it."""

    source: str
    samples: list[ListedSample] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    is_stored: bool = False
    """Its samples exist only as embeddings."""
    notes: list[str] = field(default_factory=list)
    """What a user may want to know, though nothing is wrong."""

    def fault(self, what: object, problem: str, remedy: str = "") -> None:
        self.faults.append(Fault(str(what), problem, remedy, self.source))


def require_columns(name: str, present: Sequence[str], columns: Section, needed: Sequence[str]) -> None:
    """An error for a column that is needed, or was asked for, or is there under almost its name."""
    taken = {other for _, value in columns for other in _listed(value)}
    for role, value in columns:
        for column in _listed(value):
            if column in present:
                continue
            near = difflib.get_close_matches(column, present, n=1, cutoff=0.85)
            suspect = near and near[0] not in taken and not column.startswith(near[0])  # prompt is not prompt_2
            if role in needed or role in columns.model_fields_set or suspect:
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(present)}."
                raise DataError(
                    f"{name} has no column {column!r}", f"{hint} Set columns.{role} of the source to map it."
                )


def _listed(value: Any) -> list[str]:
    """One column or several, or none, as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def current_folder(path: Path) -> str:
    """Where a path was looked for, if that depends on where one stands."""
    return "" if path.is_absolute() else f" (looked for in {Path.cwd()})"


def note_controls(listing: Listing) -> None:
    """Say how many samples have no control image, if some or all have none."""
    without = [sample.name for sample in listing.samples if not sample.controls]
    if without:
        names = ", ".join(without[:10])
        listing.notes.append(f"{len(without)} of {len(listing.samples)} samples have no control image: {names}")


def told_apart(samples: list[ListedSample]) -> list[ListedSample]:
    """Samples are called by their target; where several rows have one target, their places tell them apart."""
    counts = Counter(sample.name for sample in samples)
    return [
        replace(sample, name=f"{sample.name} ({sample.place})") if counts[sample.name] > 1 else sample
        for sample in samples
    ]
