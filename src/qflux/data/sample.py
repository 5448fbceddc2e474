"""One sample, from the first look at its files to the loss.

A sample knows what it is called, how often it trains, the images it is made of, their shapes in tokens, and where its
embeddings are. It is made once, by `dataset`; the cache adds where embeddings belong. Nothing here holds a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from PIL import Image

from qflux.data.images.decode import ImageFacts, ImageRef, load_rgb, load_rgba
from qflux.data.images.sizes import Transform
from qflux.ragged.shapes import Shapes

if TYPE_CHECKING:  # whoever lists a folder of pictures should not wait for torch
    from qflux.data.encoded import EncodedSample, Variant


@dataclass(frozen=True)
class SampleImage:
    """An image of a sample: where it is, what its header says, and how it reaches its training size."""

    ref: ImageRef
    facts: ImageFacts
    transform: Transform
    view: Transform | None = None
    """How the text encoder sees it, if it does."""
    has_alpha: bool = False
    """It is trained with its opacity."""

    def load(self) -> Image.Image:
        """The image at training size; an error if it is not the one whose header was read."""
        return self.transform(self._read())

    def load_view(self) -> Image.Image | None:
        """The image as the text encoder sees it, if it does."""
        return self.view(self._read()) if self.view else None

    def _read(self) -> Image.Image:
        return (load_rgba if self.has_alpha else load_rgb)(self.ref, self.facts.hash)


@dataclass(frozen=True)
class SampleImages:
    """What a sample is made from."""

    target: SampleImage
    controls: tuple[SampleImage, ...] = ()
    """The image to edit first."""
    mask: ImageRef | None = None
    """The edited region; it shares the target's transform."""
    mask_hash: str | None = None

    @property
    def all(self) -> tuple[SampleImage, ...]:
        """Target and controls, in the order of their tokens."""
        return (self.target, *self.controls)

    @property
    def crops_first_control(self) -> bool:
        """The first control has another aspect ratio than the target, and loses more than a step to the crop."""
        if not self.controls:
            return False
        target, control = self.target, self.controls[0]
        return control.transform.crops(*control.facts.size) and not target.transform.crops(*target.facts.size)


class Embeddings(Protocol):
    """Where the embeddings of a sample are, or belong."""

    @property
    def key(self) -> str:
        """Changes with the embeddings, and with nothing else."""

    @property
    def identity(self) -> str:
        """The same, but for how much of the model's own work has been done to them already."""

    def load(self, variant: Variant) -> EncodedSample:
        """Read them; an error names the file."""


@dataclass(frozen=True)
class Sample:
    """A sample."""

    id: str
    """From content alone: the same wherever the files are and however they are listed."""
    name: str
    prompt: str
    shapes: Shapes
    source: str = ""
    """Which source it comes from, as messages name it."""
    place: str = ""
    """Its file, as messages name it."""
    rate: float = 1.0
    """Visits per epoch."""
    is_prior: bool = False
    """A class image, for prior preservation."""
    has_mask: bool = False
    images: SampleImages | None = None
    """None where only embeddings are left."""
    embeddings: Embeddings | None = field(default=None, compare=False, repr=False)
    """Where they are or belong; none before a cache was asked."""
    text_tokens: int | None = None
    """The length of the prompt as the transformer sees it, once that is known; of several, the longest."""
    content: str = ""
    """The id of an equal sample that is no class image: those have noise of their own, and so ids of their own."""
    prompt_2: str | None = None
    """What a second text encoder reads instead of the prompt."""
    further_captions: tuple[str, ...] = ()
    """Other wordings of the prompt; a visit draws one of them all. Empty ones where only embeddings are left."""

    @property
    def captions(self) -> tuple[str, ...]:
        """The prompt and its other wordings."""
        return (self.prompt, *self.further_captions)

    @property
    def tokens(self) -> int:
        """Text and images."""
        assert self.text_tokens is not None, f"the prompt of {self.name} has not been counted"
        return self.text_tokens + self.shapes.tokens

    @property
    def own_images(self) -> SampleImages:
        """The images of a sample that has some."""
        assert self.images is not None, f"{self.name} exists only as embeddings"
        return self.images

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """`(height, width)` of the images that the text encoder sees."""
        return [image.view.size for image in self.own_images.controls if image.view]


def names(samples: Sequence[Sample], most: int | None = None) -> str:
    """Samples by name, for messages."""
    return ", ".join(sample.name for sample in samples[:most])
