"""Where samples come from, and how they reach their training size."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from qflux.config.section import AREA_SCHEMA, DECIDES, FREE, Area, Folder, Names, Section, Size, Texts
from qflux.models.registry import size_presets

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(size_presets())]


class Candidates(Section):
    """Candidate areas for the target (and what is aligned with it) and for each control."""

    preset: PresetName | None = Field(
        default=None, description="the sizes that a model was trained on", json_schema_extra=DECIDES
    )
    target: list[Area] = Field(
        default=[], description="of the target and what is aligned with it", json_schema_extra=DECIDES
    )
    controls: list[Annotated[list[Area], Field(min_length=1)]] = Field(
        default=[],
        description="list 0 is for the first control, the image to edit; list i for `<base>_control_i`",
        json_schema_extra=DECIDES,
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Candidates:
        if bool(self.target) == bool(self.preset):
            raise ValueError("needs either target areas or a preset")
        return self


def _candidates(value: Any) -> Any:
    """A plain list is the target's candidates, a plain name a preset, an empty list nothing at all."""
    if isinstance(value, str):
        return {"preset": value}
    if isinstance(value, list) and not value:
        logger.warning("data.processor: multi_resolutions is an empty list, which is no list at all: it is not used.")
        return None
    return {"target": value} if isinstance(value, list) else value


_CANDIDATES_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": AREA_SCHEMA},
        {"enum": [*size_presets(), None]},
        {
            "type": "object",
            "properties": {
                "preset": {"enum": [*size_presets(), None]},
                "target": {"type": "array", "items": AREA_SCHEMA},
                "controls": {"type": "array", "items": {"type": "array", "items": AREA_SCHEMA}},
            },
            "additionalProperties": False,
        },
    ]
}


class ProcessorSettings(Section):
    """How images reach their training size. `target_size` wins over `multi_resolutions` over `target_pixels`."""

    process_type: Literal["center_crop", "resize", "padding", "fixed_pixels"] = Field(
        default="fixed_pixels",
        description="center_crop and fixed_pixels cover the size and crop the rest; resize stretches; padding pads",
        json_schema_extra=DECIDES,
    )
    target_size: Size | None = Field(default=None, description="one fixed [height, width]", json_schema_extra=DECIDES)
    multi_resolutions: Annotated[
        Candidates | None, BeforeValidator(_candidates), WithJsonSchema(_CANDIDATES_SCHEMA)
    ] = Field(
        default=None,
        description="candidate areas: a list, {target: […], controls: [[…], …]}, or the name of a preset",
        json_schema_extra=DECIDES,
    )
    target_pixels: Area | None = Field(default=None, description="one area for all images", json_schema_extra=DECIDES)
    controls_size: list[Size] | None = Field(
        default=None,
        description="[height, width] of each control, the image to edit first; default: that one shares the target's",
        json_schema_extra=DECIDES,
    )
    controls_pixels: list[Area] | Area | None = Field(
        default=None,
        description="area of each control, the image to edit first; one number is for all of them",
        json_schema_extra=DECIDES,
    )
    controls: Literal["target", "own"] = Field(
        default="target",
        description="how the image to edit reaches its size, if nothing else says so: as its target does, cut alike; "
        "own: from its own size and aspect ratio, as further controls do",
        json_schema_extra=DECIDES,
    )
    enlarge: bool = Field(
        default=True,
        description="false: an image that is smaller than its area keeps its own pixels, cut to the multiple",
        json_schema_extra=DECIDES,
    )
    max_aspect_ratio: float | None = Field(
        default=3.0,
        ge=1.0,
        description="of an image; one beyond it is not used; null: no limit",
        json_schema_extra=DECIDES,
    )

    @model_validator(mode="after")
    def _tell_precedence(self) -> ProcessorSettings:
        order = [name for name in ("target_size", "multi_resolutions", "target_pixels") if getattr(self, name)]
        if len(order) > 1:
            logger.warning("data.processor: %s is set, so %s is not used.", order[0], " and ".join(order[1:]))
        if self.target_size and not self.enlarge:
            raise ValueError("target_size is one size for all images, so some are enlarged; leave enlarge: false out")
        if self.controls_size and self.controls_pixels:
            logger.warning(
                "data.processor: controls_size is set, so controls_pixels is used for further controls only."
            )
        return self


class Source(Section):
    """What every source of samples has. A sample trains `repeats` x `weight` times in an epoch."""

    type: str
    path: Folder = Field(description="a folder or a file; for Hugging Face also a hub id", json_schema_extra=FREE)
    repeats: int = Field(
        default=1, ge=1, le=10_000, description="visits of a sample in an epoch", json_schema_extra=FREE
    )
    weight: float = Field(
        default=1.0,
        ge=0.001,
        le=10_000,
        description="may be a fraction: 0.25 is once in four epochs, in turns",
        json_schema_extra=FREE,
    )

    corrections: Folder | None = Field(
        default=None,
        description="a folder of what was changed about it in `qflux studio`: prompts, masks, samples left out",
        json_schema_extra=FREE,
    )

    @model_validator(mode="after")
    def _not_too_often(self) -> Source:
        if self.rate > 10_000:
            raise ValueError(f"repeats x weight is {self.rate:g}; a sample trains at most 10000 times in an epoch")
        return self

    @property
    def rate(self) -> float:
        """Visits of a sample per epoch."""
        return self.repeats * self.weight


class FolderSource(Source):
    """training_images/ with a prompt beside each image, and control_images/."""

    type: Literal["folder"] = Field(default="folder", description="this kind; may be left out", json_schema_extra=FREE)


class TableColumns(Section):
    """Where a table has what. Further controls are in `<control>_1`, `<control>_2`, …"""

    target: str = Field(default="path_target", description="the wanted image", json_schema_extra=FREE)
    control: str = Field(
        default="path_control",
        description="the image to edit; in JSON it may hold a list, with further ones behind it",
        json_schema_extra=FREE,
    )
    controls: Names | None = Field(
        default=None,
        description="instead of `control`: a column for each control, the image to edit first",
        json_schema_extra=FREE,
    )
    prompt: str = Field(
        default="prompt",
        description="the instruction; in JSON it may hold a list of wordings, of which a visit draws one",
        json_schema_extra=FREE,
    )
    captions: Names | None = Field(
        default=None, description="columns with other wordings of the prompt", json_schema_extra=FREE
    )
    prompt_2: str | None = Field(
        default="prompt_2",
        description="what a second text encoder reads instead, if the table has it; null: none",
        json_schema_extra=FREE,
    )
    mask: str = Field(
        default="path_mask", description="the edited region, if the table has one", json_schema_extra=FREE
    )


class CsvSource(Source):
    """A CSV file with a header, separated by commas, semicolons or tabs; paths are relative to `root`."""

    type: Literal["csv"] = Field(description="this kind", json_schema_extra=FREE)
    root: Folder | None = Field(default=None, description="default: the folder of the file", json_schema_extra=FREE)
    columns: TableColumns = Field(default=TableColumns(), description="what the columns are called")


class JsonlSource(Source):
    """A file with one JSON object per line, or a `.json` with a list of them, with the fields of a CSV source."""

    type: Literal["jsonl"] = Field(description="this kind", json_schema_extra=FREE)
    root: Folder | None = Field(default=None, description="default: the folder of the file", json_schema_extra=FREE)
    columns: TableColumns = Field(default=TableColumns(), description="what the fields are called")


class HubColumns(Section):
    """Where a Hugging Face data set has what."""

    target: str = Field(default="target_image", description="the wanted image", json_schema_extra=FREE)
    controls: Texts = Field(
        default=("control_images",),
        description="a column with one image or a list of images; or several columns",
        json_schema_extra=FREE,
    )
    prompt: str = Field(
        default="prompt",
        description="the instruction, or a list of wordings of it, of which a visit draws one",
        json_schema_extra=FREE,
    )
    captions: Names | None = Field(
        default=None, description="columns with other wordings of the prompt", json_schema_extra=FREE
    )
    prompt_2: str | None = Field(
        default="prompt_2",
        description="what a second text encoder reads instead, if there is one; null: none",
        json_schema_extra=FREE,
    )
    mask: str = Field(default="control_mask", description="the edited region, if there is one", json_schema_extra=FREE)


class HubSource(Source):
    """A Hugging Face data set: a hub id, a saved data set, or parquet or arrow files. Needs `qflux[datasets]`."""

    type: Literal["huggingface"] = Field(description="this kind", json_schema_extra=FREE)
    split: str = Field(default="train", description="of the data set", json_schema_extra=FREE)
    revision: str | None = Field(
        default=None, description="of a hub id: a branch, a tag or a commit", json_schema_extra=FREE
    )
    columns: HubColumns = Field(default=HubColumns(), description="what the columns are called")


class CacheSource(Source):
    """Embeddings without images: another cache folder, or torch files of format 1.0 or 2.0, one sample each."""

    type: Literal["cache"] = Field(description="this kind", json_schema_extra=FREE)
    default_size: Size | None = Field(
        default=None,
        description="[height, width] in pixels, for 1.0 files that do not say theirs",
        json_schema_extra=FREE,
    )

    @model_validator(mode="after")
    def _nothing_to_correct(self) -> CacheSource:
        if self.corrections is not None:
            raise ValueError("corrections are of prompts and masks, and a cache has embeddings of them only")
        return self


SOURCES: dict[str, type[Source]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in (FolderSource, CsvSource, JsonlSource, HubSource, CacheSource)
}
"""ADD THE SECTION OF A DATA SOURCE HERE, and below."""
AnySource = Annotated[FolderSource | CsvSource | JsonlSource | HubSource | CacheSource, Field(discriminator="type")]
SourceList = list[
    Annotated[AnySource, BeforeValidator(lambda v: {"type": "folder", **v} if isinstance(v, dict) else v)]
]


class HeldOutSettings(Section):
    """Samples that never train: so many, such a share, or sources of their own."""

    count: int | None = Field(
        default=None, ge=1, description="so many of the training sources' samples", json_schema_extra=FREE
    )
    fraction: float | None = Field(default=None, gt=0, lt=1, description="such a share of them", json_schema_extra=FREE)
    sources: SourceList | None = Field(
        default=None, min_length=1, description="sources of their own", json_schema_extra=FREE
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> HeldOutSettings:
        if sum(value is not None for value in (self.count, self.fraction, self.sources)) != 1:
            raise ValueError("give one of count, fraction and sources")
        return self


class DataSettings(Section):
    """Where the samples are and how many make a micro-batch."""

    path: Folder | None = Field(
        default=None, description="one folder; the short form of `sources`", json_schema_extra=FREE
    )
    sources: SourceList = Field(
        default=[], description="folders, CSV and JSONL tables, Hugging Face data sets", json_schema_extra=FREE
    )
    held_out: HeldOutSettings | None = Field(default=None, description="what validates and never trains")
    class_sources: SourceList = Field(
        default=[], description="class images, for prior preservation", json_schema_extra=FREE
    )
    batch_size: int | None = Field(
        default=None, ge=1, description="samples in a micro-batch, of any sizes; default 1", json_schema_extra=FREE
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="instead of batch_size: text and image tokens in a micro-batch",
        json_schema_extra=FREE,
    )
    num_workers: int = Field(
        default=2, ge=0, le=256, description="threads that read samples ahead of the step", json_schema_extra=FREE
    )
    on_bad_sample: Literal["error", "skip"] = Field(
        default="error",
        description="skip: leave out what can't be used, and name each one in the ledger",
        json_schema_extra=FREE,
    )
    processor: ProcessorSettings = Field(
        default=ProcessorSettings(), description="how images reach their training size"
    )

    @model_validator(mode="after")
    def _one_of_each(self) -> DataSettings:
        if (self.path is None) == (not self.sources):
            raise ValueError("give either path (one folder) or sources (a list)")
        if self.batch_size is not None and self.max_tokens is not None:
            raise ValueError("batch_size and max_tokens are both set; set one of them to null")
        return self

    @property
    def training_sources(self) -> list[Source]:
        # Without a second validation: the path has been through one.
        return [FolderSource.model_construct(path=self.path)] if self.path is not None else list(self.sources)
