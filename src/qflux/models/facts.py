"""What is known of a family without loading torch: what configs, `init` and the registry ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from qflux.errors import DataError
from qflux.ragged.shapes import PIXELS_PER_TOKEN

Size = tuple[int, int]
"""`(height, width)` in pixels."""


@dataclass(frozen=True)
class Shipped:
    """A small model that comes with qflux, and what it is best trained with."""

    name: str
    """What `model.pretrained` calls it."""
    family: str
    folder: Path
    text_tokens: int
    """The length every prompt is padded to."""
    learning_rate: float
    lora_targets: tuple[str, ...]
    """A model that small has little to spare, so its modulation trains too."""


@dataclass(frozen=True)
class Described:
    """What a checkpoint says of itself, in `model_index.json` and the description of its transformer."""

    name: str
    """A hub id or a folder."""
    pipeline: str | None = None
    transformer: str | None = None
    is_distilled: bool = False
    width: int | None = None
    """Channels of a token inside the transformer."""
    text_channels: int | None = None
    """Of the text that the transformer takes."""
    embeds_guidance: bool | None = None
    """The transformer is told how much guidance to show."""
    sigmas: tuple[float, ...] = ()
    """Noise levels that its authors make an image at, before the shift, if they say so."""


@dataclass(frozen=True)
class Facts:
    """A family in numbers and names: of its published checkpoint, and of the pipeline that defines it."""

    name: str
    title: str
    """What people call it."""
    hub_id: str
    """Its own published checkpoint."""
    pipeline: str
    """Name of the diffusers pipeline that defines what a prediction is, and loads the LoRA."""
    transformer: str
    """Name of the diffusers class of what trains."""
    trainer: str
    """Name of the trainer class that is bound to it."""
    gigabytes: float
    """Of the transformer, in bfloat16."""
    width: int
    """Channels of a token inside the transformer. The plan weighs attention against linear layers by it."""
    controls: tuple[int, int | None]
    """The least and the most control images a sample may have."""
    text_channels: int
    """Channels of a text token."""
    image_channels: int
    """Channels of an image token."""
    max_sequence_length: int
    """Text tokens of a prompt, unless a config asks for fewer."""
    num_inference_steps: int
    true_cfg_scale: float
    """1: guidance is built into the model, and a negative prompt has no effect unless somebody asks for it."""
    lora_targets: tuple[str, ...]
    """Layers that a LoRA is put on, by the end of their names, unless a config names others."""
    pixels_per_token: int = PIXELS_PER_TOKEN
    """Height and width in pixels of what an image token stands for."""
    size_multiple: int = PIXELS_PER_TOKEN
    """Heights and widths of images are multiples of this many pixels."""
    negative_prompt: str | None = None
    """What the pipeline sets against a prompt if nobody says anything; with one, true CFG is on."""
    guidance_scale: float = 3.5
    """What a guidance-distilled model is told."""
    text_projection: str | None = None
    """The transformer's layer that text goes through first, where caching its output saves space."""
    embeds_guidance: bool | None = None
    """The transformer is told how much guidance to show; of a family whose variants differ in it."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Pipelines of checkpoints with the same transformer that are used in another way, and in which."""
    distilled_from: str | None = None
    """The hub id of what it was made from to need few steps only: that is what to train."""
    shares_prefix: bool = False
    """Text and controls do not see the target: they may stand once before several targets."""
    has_alpha: bool = False
    """Images have a fourth channel, their opacity."""
    has_second_prompt: bool = False
    """A second text encoder may read another prompt than the first."""
    compiled_activations: float = 0.77
    """What compiled blocks keep for the backward pass, of what blocks keep that are not compiled; measured."""
    compiled_around: float = 2.0
    """What they need besides while they run backward, of what others need; measured."""
    sigmas: tuple[float, ...] = ()
    """Noise levels of that many steps, before the shift, where they are not spread evenly."""
    spellings: tuple[str, ...] = ()
    """Patterns of other checkpoints' names that are of this family."""
    original_trainer: str | None = None
    """What configs of the original qflux call it."""
    size_presets: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    """Lists of sizes that a config may name."""
    shipped: Shipped | None = None
    variants: tuple[Facts, ...] = ()
    """Of other checkpoints that are of this family; what a checkpoint is, it says itself."""

    @property
    def is_distilled(self) -> bool:
        return self.distilled_from is not None

    @property
    def caution(self) -> tuple[str, str] | None:
        """What somebody who is about to train this checkpoint should know, and what to do."""
        if self.distilled_from is None:
            return None
        return (
            f"{self.title} was distilled to make images in a few steps, and training takes that away",
            f"train {self.distilled_from} instead, and use the LoRA with either of them.",
        )

    def of(self, checkpoint: Described) -> Facts:
        """The facts of a checkpoint: this family's own, or those of the variant that it is."""
        found = [self, *self.variants]
        if checkpoint.is_distilled:  # its transformer says so, whatever the rest of the checkpoint is of
            found = [facts for facts in found if facts.is_distilled] or found
        for sign in (
            lambda facts: facts.hub_id.lower() == checkpoint.name.lower(),
            lambda facts: facts.pipeline == checkpoint.pipeline,
            lambda facts: facts.embeds_guidance == checkpoint.embeds_guidance,
            lambda facts: facts.is_distilled == checkpoint.is_distilled,
            lambda facts: facts.width == checkpoint.width,
        ):
            found = list(filter(sign, found)) or found
        if checkpoint.sigmas:
            return replace(found[0], sigmas=checkpoint.sigmas, num_inference_steps=len(checkpoint.sigmas))
        return found[0]

    @property
    def attention_tokens(self) -> int:
        """A sample of this many tokens spends as much on attention as on everything else.

        A block's linear layers cost 24 width² FLOP per token, attention 4 width per pair of tokens.
        """
        return 6 * self.width

    def takes(self, controls: int) -> bool:
        """Whether a sample may have this many controls."""
        least, most = self.controls
        return least <= controls and (most is None or controls <= most)

    def check_controls(self, count: int, what: str, remedy: str = "") -> None:
        """An error if a sample can't have this many controls."""
        if not self.takes(count):
            least, most = self.controls
            allowed = f"{least} or more" if most is None else f"{least}" if least == most else f"{least} to {most}"
            raise DataError(f"{what}: {count} control images; {self.name} takes {allowed}", remedy)

    def check_prompts(self, second: str | None, what: str) -> None:
        """An error if a sample has a second prompt and the family has no second text encoder."""
        if second is not None and not self.has_second_prompt:
            raise DataError(
                f"{what}: a second prompt (prompt_2), and {self.name} has one text encoder, which reads the prompt",
                "leave it out; a table's column of that name is left alone with columns.prompt_2: null.",
            )

    def spelled_in(self, name: str) -> int:
        """How many letters of a name speak for this family: 0 if it does not look like one of its checkpoints."""
        found = (re.search(pattern, name.lower()) for pattern in self.spellings)
        return max((len(match[0]) for match in found if match), default=0)
