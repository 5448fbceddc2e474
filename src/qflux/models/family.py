"""What a model family is: facts, and a small record of callables. The shared code never asks which family it has.

Shapes: B samples, N image tokens of the whole batch, C channels of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qflux.config import Config
from qflux.data.encoded import Prompt, TextEmbedding, TextLimit
from qflux.data.images.sizes import Transform
from qflux.errors import ConfigError
from qflux.losses.timesteps import NoiseShift
from qflux.models.facts import Facts
from qflux.ragged.layout import PackedLayout, PaddedLayout, RaggedLayout
from qflux.ragged.prefix import PrefixMemory
from qflux.ragged.shapes import ImageShape, Shapes
from qflux.ragged.spans import Arrangement


class Encoder(Protocol):
    """Pixels and prompts to embeddings, and embeddings back to pixels."""

    def encode_text(self, prompts: Sequence[Prompt]) -> list[TextEmbedding]:
        """One embedding per prompt; no prompt's result depends on the others."""

    def encode_images(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Pixels `(3, H, W)` in [-1, 1], all of one size, as tokens `(n, C)`; in one batch.

        Where images have an opacity, it is a fourth channel.
        """

    def decode_image(self, tokens: Tensor, shape: ImageShape) -> Tensor:
        """Tokens `(n, C)` as pixels `(3, H, W)`, about [-1, 1], or `(4, H, W)`."""

    def noise(self, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """The noise tokens `(n, C)` that the reference pipeline draws for an image of this shape."""


@dataclass(frozen=True)
class ModelInputs:
    """One forward pass of the transformer, for any family."""

    images: Tensor
    """`(N, C)` per sample the noisy targets, then the controls."""
    shapes: Sequence[Shapes]
    text: Sequence[TextEmbedding]
    sigma: Tensor
    """`(R,)` noise levels in [0, 1] of the targets, of which a sample has one; several, where they share its prefix."""
    guidance: float
    padded: bool = False
    """Run the padded reference instead of the packed layout."""
    ragged: bool = False
    """Run samples of one shape, too, as samples of different shapes run: only there attention can be kept."""
    onward: Tensor | None = None
    """Noise levels that sampling goes on to; none in training, where a step leads nowhere."""
    memory: PrefixMemory | None = None
    """Where sampling keeps what does not depend on the noise, in families that have such; it is of this batch."""

    @property
    def text_lengths(self) -> list[int]:
        return [len(text.tokens) for text in self.text]

    def layout(self, arrangements: Sequence[Arrangement] | None = None) -> RaggedLayout:
        """Where the tokens lie; `arrangements` are for families whose images do not simply follow the text."""
        images = [shapes.images for shapes in self.shapes]
        targets = [shapes.target_tokens for shapes in self.shapes]
        packed = PackedLayout.from_shapes(
            self.text_lengths, images, self.images.device, arrangements, self.ragged, targets
        )
        return PaddedLayout.of(packed) if self.padded else packed


PromptView = Callable[[int, tuple[int, int], Transform], Transform | None]
"""How the text encoder sees a control: from its index, its own (width, height) and its training transform."""


@dataclass(frozen=True)
class TextCount:
    """The length of a prompt."""

    used: int
    """Tokens that the transformer sees."""
    wanted: int
    """Tokens that the limit on prompts is about, before anything is cut: those of images are not among them."""


TextCounter = Callable[[str, Sequence[tuple[int, int]]], TextCount]
"""The length of a prompt with images of these (height, width) in it, from the tokenizer alone."""


@dataclass(frozen=True)
class InputWidths:
    """Channels of what a transformer takes."""

    text: int
    image: int
    pooled: int | None = None
    """Of the pooled text; none where there is none."""
    has_places: bool = False
    """Controls stand inside the text, which says where."""
    projected_text: int | None = None
    """Of text that has been through the transformer's own projection, where that may be."""


@dataclass(frozen=True)
class Arithmetic:
    """FLOP of one forward pass of a transformer."""

    per_token: float
    """In linear layers."""
    per_pair: float
    """In attention, for every pair of tokens of a sample."""


def all_pairs(text: int, shapes: Shapes) -> int:
    """Every token sees every token."""
    return (text + shapes.tokens) ** 2


@dataclass(frozen=True)
class Family:
    """Everything the shared code needs to know about a family."""

    facts: Facts
    text_parts: tuple[str, ...]
    """Parts of a checkpoint that text embeddings depend on."""
    image_parts: tuple[str, ...]
    """Parts of a checkpoint that latents depend on."""
    tokenizer_parts: tuple[str, ...]
    """Parts of a checkpoint that tell how long a prompt is."""
    prompt_view: PromptView
    reference_view: Callable[[int, int], Transform]
    """How the reference pipeline brings an image of this (width, height) to size, if nobody asks for another."""
    tiny: Callable[..., Any]
    """`tiny(seed)`: all components, real classes, small and random."""
    transformer: type[Any]
    """The class of what trains."""
    load: Callable[[str, Sequence[str], torch.dtype, torch.device], Any]
    """`load(pretrained, parts, dtype, device)`: components with these parts filled."""
    encoder: Callable[[Any, TextLimit], Encoder]
    """`encoder(components, limit)`."""
    text_counter: Callable[[Any, TextLimit], TextCounter]
    """`text_counter(components, limit)`, from the tokenizer parts."""
    velocity: Callable[[nn.Module, ModelInputs], Tensor]
    """`velocity(transformer, inputs)`: `(N, C)`, of which the target rows mean something."""
    combine: Callable[[Tensor, Tensor, float], Tensor]
    """`combine(conditional, unconditional, scale)`: true classifier-free guidance on velocities `(n, C)`."""
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    """The repeated blocks of a transformer: what is compiled, recomputed and sharded."""
    widths: Callable[[Any], InputWidths]
    """Of a transformer's inputs."""
    arithmetic: Callable[[Any], Arithmetic]
    """Of a transformer."""
    noise_shift: Callable[[Any], NoiseShift]
    """Of a checkpoint's scheduler; training and sampling both go by it."""
    lora_prefix: str
    """Of LoRA keys that diffusers' pipeline loads together with their alphas."""
    original_names: Callable[[Iterable[str]], dict[str, tuple[str, ...]]]
    """What the model's authors call its layers, where that is not diffusers' name: from the names of all layers."""
    pairs: Callable[[int, Shapes], int] = all_pairs
    """Pairs of tokens of which one sees the other, in a sample with so many text tokens and these images."""
    optional_parts: tuple[str, ...] = ()
    """Parts that a checkpoint need not have."""
    lone_view: Callable[[int, int], Transform] | None = None
    """The same for an image that is the only one, where that makes a difference."""
    result_like: int = 0
    """Which image the reference pipeline takes the result's size from; the last one is -1."""
    lora_alphas: bool = True
    """diffusers' pipeline reads alphas beside the matrices. Where it does not, the strength is in the matrices."""
    keeps_names: bool = False
    """Layers that `original_names` does not name are called the same elsewhere."""
    swapped_names: frozenset[str] = frozenset()
    """Original names of layers whose outputs are two halves, which diffusers has in the other order."""
    usage_note: str = ""
    """What a user of a LoRA should know in other programs; it stands on the model card."""

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def pipeline(self) -> str:
        return self.facts.pipeline

    @property
    def controls(self) -> tuple[int, int | None]:
        return self.facts.controls

    @property
    def pixels_per_token(self) -> int:
        return self.facts.pixels_per_token

    @property
    def size_multiple(self) -> int:
        return self.facts.size_multiple

    @property
    def has_alpha(self) -> bool:
        return self.facts.has_alpha

    def check_controls(self, count: int, what: str) -> None:
        """An error if a sample can't have this many controls."""
        self.facts.check_controls(count, what)

    def check_prompts(self, second: str | None, what: str) -> None:
        """An error if a sample has a second prompt that nobody would read."""
        self.facts.check_prompts(second, what)


def text_limit(config: Config, family: Family) -> TextLimit:
    """The limit on prompts that a config asks for; more than the family takes is an error."""
    most = family.facts.max_sequence_length
    tokens = config.model.max_sequence_length or most
    if tokens > most:
        raise ConfigError(f"model.max_sequence_length is {tokens}; {family.name} takes at most {most}")
    return TextLimit(tokens, truncate=config.model.on_long_prompt == "truncate", most=most)
