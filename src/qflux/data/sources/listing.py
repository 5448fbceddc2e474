"""What a source lists: samples by name and path, nothing opened, and what is wrong with the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from qflux.data.images.decode import ImageRef


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
