"""The whole configuration, validated before anything is loaded.

A config file is YAML. `load_config` reads it, applies `path.to.key=value` overrides, accepts the `class_path` /
`init_args` nesting of older files, and reports every problem at once, with its path, its value and what would be right.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from qflux.errors import ConfigError, collected

logger = logging.getLogger(__name__)

STEP = 16
"""Sizes are multiples of this many pixels: one token."""


class Section(BaseModel):
    """A part of the configuration: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _area(value: Any) -> Any:
    """An area in pixels, from an integer or a string such as "512*768"."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+)\s*[*x×]\s*(\d+)\s*", value)
        if not match:
            raise ValueError('an area is an integer of pixels or a string such as "512*768"')
        return int(match[1]) * int(match[2])
    return value


def _side(value: int) -> int:
    if value % STEP:
        lower = value // STEP * STEP
        raise ValueError(f"must be a multiple of {STEP}; nearest are {lower} and {lower + STEP}")
    return value


Area = Annotated[int, BeforeValidator(_area), Field(ge=STEP * STEP)]
Side = Annotated[int, Field(ge=STEP), BeforeValidator(lambda v: _side(v) if isinstance(v, int) else v)]
Size = Annotated[tuple[Side, Side], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
Folder = Annotated[Path, Field(strict=False), AfterValidator(lambda path: path.expanduser())]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class Candidates(Section):
    """Candidate areas for the target (and what is aligned with it) and for each further control."""

    preset: Literal["kontext"] | None = Field(default=None, description="the 17 sizes FLUX Kontext was trained on")
    target: list[Area] = []
    controls: list[Annotated[list[Area], Field(min_length=1)]] = Field(
        default=[], description="list i is for `<base>_control_{i+1}`"
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
    return ({"target": value} if value else None) if isinstance(value, list) else value


class ProcessorSettings(Section):
    """How images reach their training size. `target_size` wins over `multi_resolutions` over `target_pixels`."""

    process_type: Literal["center_crop", "resize", "padding", "fixed_pixels"] = Field(
        default="fixed_pixels",
        description="center_crop and fixed_pixels cover the size and crop the rest; resize stretches; padding pads",
    )
    target_size: Size | None = Field(default=None, description="one fixed [height, width]")
    multi_resolutions: Annotated[Candidates | None, BeforeValidator(_candidates)] = Field(
        default=None, description='candidate areas: a list, {target: […], controls: [[…], …]}, or the preset "kontext"'
    )
    target_pixels: Area | None = Field(default=None, description="one area for all images")
    controls_size: list[Size] | None = Field(default=None, description="[height, width] of each further control")
    controls_pixels: list[Area] | Area | None = Field(default=None, description="area of each further control")
    max_aspect_ratio: float = Field(default=3.0, ge=1.0)

    @model_validator(mode="after")
    def _tell_precedence(self) -> ProcessorSettings:
        order = [name for name in ("target_size", "multi_resolutions", "target_pixels") if getattr(self, name)]
        if len(order) > 1:
            logger.warning("data.processor: %s is set, so %s is not used.", order[0], " and ".join(order[1:]))
        if self.controls_size and self.controls_pixels:
            logger.warning(
                "data.processor: controls_size is set, so controls_pixels is used for further controls only."
            )
        return self


class Source(Section):
    """What every source of samples has. A sample trains `repeats` x `weight` times in an epoch."""

    path: Folder
    repeats: int = Field(default=1, ge=1, le=10_000)
    weight: float = Field(
        default=1.0, ge=0.001, le=10_000, description="may be a fraction: 0.25 is once in four epochs, in turns"
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

    type: Literal["folder"] = "folder"


class TableColumns(Section):
    """Where a table has what. Further controls are in `<control>_1`, `<control>_2`, …"""

    target: str = "path_target"
    control: str = "path_control"
    prompt: str = "prompt"
    mask: str = "path_mask"


class CsvSource(Source):
    """A CSV file with a header; paths are relative to `root`."""

    type: Literal["csv"]
    root: Folder | None = Field(default=None, description="default: the folder of the file")
    columns: TableColumns = TableColumns()


class JsonlSource(Source):
    """A file with one JSON object per line, with the fields of a CSV source."""

    type: Literal["jsonl"]
    root: Folder | None = Field(default=None, description="default: the folder of the file")
    columns: TableColumns = TableColumns()


class HubColumns(Section):
    """Where a Hugging Face data set has what."""

    target: str = "target_image"
    controls: str = Field(default="control_images", description="one image, or a list of images")
    prompt: str = "prompt"
    mask: str = "control_mask"


class HubSource(Source):
    """A Hugging Face data set: a hub id, a saved data set, or parquet or arrow files. Needs `qflux[datasets]`."""

    type: Literal["huggingface"]
    split: str = "train"
    revision: str | None = Field(default=None, description="of a hub id: a branch, a tag or a commit")
    columns: HubColumns = HubColumns()


class CacheSource(Source):
    """Embeddings without images: another cache folder, or torch files of format 1.0 or 2.0, one sample each."""

    type: Literal["cache"]
    default_size: Size | None = Field(
        default=None, description="[height, width] in pixels, for 1.0 files that do not say theirs"
    )


AnySource = Annotated[FolderSource | CsvSource | JsonlSource | HubSource | CacheSource, Field(discriminator="type")]
SourceList = list[
    Annotated[AnySource, BeforeValidator(lambda v: {"type": "folder", **v} if isinstance(v, dict) else v)]
]


class HeldOutSettings(Section):
    """Samples that never train: so many, such a share, or sources of their own."""

    count: int | None = Field(default=None, ge=1)
    fraction: float | None = Field(default=None, gt=0, lt=1)
    sources: SourceList | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_of_them(self) -> HeldOutSettings:
        if sum(value is not None for value in (self.count, self.fraction, self.sources)) != 1:
            raise ValueError("give one of count, fraction and sources")
        return self


class DataSettings(Section):
    """Where the samples are and how many make a micro-batch."""

    path: Folder | None = Field(default=None, description="one folder; the short form of `sources`")
    sources: SourceList = Field(default=[], description="folders, CSV and JSONL tables, Hugging Face data sets")
    held_out: HeldOutSettings | None = Field(default=None, description="what validates and never trains")
    class_sources: SourceList = Field(default=[], description="class images, for prior preservation")
    batch_size: int | None = Field(default=None, ge=1, description="samples in a micro-batch, of any sizes; default 1")
    max_tokens: int | None = Field(
        default=None, ge=1, description="instead of batch_size: text and image tokens in a micro-batch"
    )
    num_workers: int = Field(default=2, ge=0, le=256, description="threads that read samples ahead of the step")
    on_bad_sample: Literal["error", "skip"] = Field(
        default="error", description="skip: leave out what can't be used, and name each one in the ledger"
    )
    processor: ProcessorSettings = ProcessorSettings()

    @model_validator(mode="after")
    def _one_of_each(self) -> DataSettings:
        if (self.path is None) == (not self.sources):
            raise ValueError("give either path (one folder) or sources (a list)")
        if self.batch_size is not None and self.max_tokens is not None:
            raise ValueError("batch_size and max_tokens are both set; set one of them to null")
        return self

    @property
    def training_sources(self) -> list[Source]:
        return [FolderSource(path=self.path)] if self.path is not None else list(self.sources)


class ModelSettings(Section):
    """Which weights, and in what precision the frozen part runs."""

    pretrained: str = Field(description="a folder or a hub id in diffusers format")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, …")
    max_sequence_length: int | None = Field(
        default=None, ge=1, description="text tokens at most; default: 512 for FLUX, 1024 for Qwen"
    )
    on_long_prompt: Literal["error", "truncate"] = Field(
        default="error", description="what becomes of a longer prompt; those cut are counted"
    )


class CacheSettings(Section):
    """Where embeddings are kept."""

    use_cache: bool = Field(default=True, description="false: encode every sample again whenever it trains")
    batch_size: int = Field(
        default=1, ge=1, description="images or prompts encoded at once; above 1 results differ by rounding"
    )
    path: Folder | None = Field(default=None, description="default: <output_dir>/cache")


class LoraSettings(Section):
    """The adapter that trains."""

    rank: int = Field(default=16, ge=1, le=2048)
    alpha: float | None = Field(default=None, gt=0, description="default: the rank, so that the scale is 1")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: Names = Field(default=("to_q", "to_k", "to_v", "to_out.0"), min_length=1)
    init: Literal["gaussian", "kaiming"] = Field(default="gaussian", description="of the down projection; up is zero")


class OptimizerSettings(Section):
    """Any torch-style optimizer."""

    class_path: str = Field(default="torch.optim.AdamW", pattern=r"^[\w.]+\.\w+$")
    init_args: dict[str, Any] = Field(default={"lr": 1e-4, "weight_decay": 1e-4})


class TrainSettings(Section):
    """The loop."""

    max_train_steps: int | None = Field(default=None, ge=1, description="optimizer steps; wins over num_epochs")
    num_epochs: int = Field(default=1, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="micro-batches in an optimizer step")
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    guidance: float = Field(default=3.5, description="guidance value given to a guidance-distilled model")
    caption_dropout: float = Field(default=0.0, ge=0, lt=1, description="share of visits with an empty prompt")
    control_dropout: float = Field(default=0.0, ge=0, lt=1, description="share of visits without control images")
    gradient_checkpointing: bool = True
    compile: bool = Field(default=False, description="torch.compile of each block; sizes may vary freely")
    execution: Literal["packed", "padded"] = Field(default="packed", description="padded is the slow reference")
    checkpoint_every: int = Field(default=250, ge=1, description="optimizer steps")
    keep_checkpoints: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _warmup_needs_a_schedule(self) -> TrainSettings:
        if self.lr_warmup_steps and self.lr_scheduler == "constant":
            raise ValueError("lr_warmup_steps has no effect on lr_scheduler constant; use constant_with_warmup")
        return self


class MaskLossSettings(Section):
    foreground_weight: float = Field(default=2.0, ge=0)
    background_weight: float = Field(default=1.0, ge=0)


class TimestepSettings(Section):
    """How the noise level of a sample is drawn."""

    density: Literal["uniform", "logit_normal"] = "logit_normal"
    mean: float = 0.0
    std: float = Field(default=1.0, gt=0)
    shift: Literal["none", "fixed", "resolution"] = Field(
        default="resolution", description="resolution: from the sample's own target tokens"
    )
    fixed_shift: float = Field(default=3.0, gt=0)


class LossSettings(Section):
    """The objective."""

    use_mask_loss: bool = Field(default=False, description="weight the edited region of samples that have a mask")
    mask_loss_fn: MaskLossSettings = MaskLossSettings()
    normalize_by_valid_tokens: bool = Field(
        default=True, description="true: every token counts the same; false: every image counts the same"
    )
    prior_weight: float = Field(default=1.0, ge=0, description="of the class images' loss, if there are any")
    timesteps: TimestepSettings = TimestepSettings()


class PredictSettings(Section):
    """Defaults of `qflux predict`."""

    num_inference_steps: int | None = Field(default=None, ge=1, description="default: 28 for FLUX, 50 for Qwen")
    guidance_scale: float = Field(default=3.5, description="told to guidance-distilled models (FLUX)")
    negative_prompt: str | None = Field(default=None, description="switches true CFG on; may be a space")
    true_cfg_scale: float | None = Field(default=None, description="default: 1 for FLUX (off), 4 for Qwen")
    seed: Seed = 0


class Config(Section):
    """Everything a run depends on."""

    family: Literal["flux-kontext", "qwen-image", "qwen-image-edit", "qwen-image-edit-plus"] = "flux-kontext"
    output_dir: Folder = Path("runs")
    run_name: str = Field(
        default="run", pattern=r"^[\w][\w.-]*$", description="a folder of output_dir; `cache` is taken"
    )
    seed: Seed = 0
    model: ModelSettings
    data: DataSettings
    cache: CacheSettings = CacheSettings()
    lora: LoraSettings = LoraSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    train: TrainSettings = TrainSettings()
    loss: LossSettings = LossSettings()
    predict: PredictSettings = PredictSettings()

    @model_validator(mode="after")
    def _cache_is_no_run(self) -> Config:
        if self.run_name == "cache" and self.cache.path is None:
            raise ValueError("run_name: cache is the folder of the embedding cache; choose another name")
        return self

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.run_name

    @property
    def cache_dir(self) -> Path:
        return self.cache.path or self.output_dir / "cache"

    def dump(self) -> dict[str, Any]:
        """Plain values, as they would stand in a config file."""
        return self.model_dump(mode="json")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as a string; a learning rate is a number. A key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for key in keys if isinstance(key, str) and keys.count(key) > 1]
        if twice:
            raise yaml.YAMLError(
                f"the key {twice[0]!r} stands twice in one section, at line {node.start_mark.line + 1}"
            )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A validated config from a YAML file or a mapping, with `path.to.key=value` overrides applied."""
    values = _read(Path(source)) if isinstance(source, str | Path) else _copy(source)
    unwrapping = [
        *_unwrap(values, ("data",), ("ImageDataset", "ImageEditDataset")),
        *_unwrap(values, ("data", "processor"), ("ImageProcessor",)),
    ]
    for override in overrides:
        _override(values, override)
    values = {key: value for key, value in values.items() if value is not None}  # an empty section is its defaults
    problems = unwrapping
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = [*unwrapping, *dict.fromkeys(_explain(problem) for problem in error.errors())]
    if problems:
        name = f" {source}" if isinstance(source, str | Path) else ""
        raise collected(ConfigError, f"the configuration{name} is not valid", problems)
    return config


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no config file at {path}", "check the path; recipes/ holds one for each family.")
    try:
        values = _parse(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a mapping of sections", "start from a recipe.")
    return values


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _unwrap(values: dict[str, Any], path: tuple[str, ...], classes: tuple[str, ...]) -> list[str]:
    """Lift `init_args` of the section at `path` into the section; its `class_path` must name what it becomes here.

    Returns what is wrong with it.
    """
    node: Any = values
    for key in path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    section = node.get(path[-1]) if isinstance(node, dict) else None
    if not isinstance(section, dict):
        return []
    name, problems = ".".join(path), []
    class_path = section.pop("class_path", None)
    if class_path is not None and str(class_path).rsplit(".", 1)[-1] not in classes:
        problems.append(f"{name}.class_path: {class_path!r} is not in qflux; remove it, or use {' or '.join(classes)}")
    inner = section.pop("init_args", None) or {}
    if not isinstance(inner, dict):
        return [*problems, f"{name}.init_args: {inner!r} is not right: a mapping is required"]
    problems += [f"{name}.{key}: set both directly and under init_args" for key in inner if key in section]
    section.update(inner)
    return problems


def _override(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r} is not of the form path.to.key=value", "for example train.num_epochs=3.")
    node = values
    for depth, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        node = child
    try:
        node[keys[-1]] = _parse(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from None


def _explain(problem: Any) -> str:
    """One validation problem as: path, value, what would be right."""
    location = [part for i, part in enumerate(problem["loc"]) if not _is_union_tag(problem["loc"], i)]
    path = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        *parents, key = location
        known = _known_keys(problem["loc"][:-1])
        nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        suggestion = ".".join(map(str, [*parents, *nearest]))
        return f"{path}: unknown key; " + (
            f"did you mean {suggestion}?" if nearest else f"known here: {', '.join(known)}"
        )
    if problem["type"] == "missing":
        return f"{path}: missing; a value is required"
    if problem["type"] == "union_tag_invalid":
        return f"{path}.type: {problem['ctx']['tag']!r} is not right: use one of {problem['ctx']['expected_tags']}"
    return f"{path}: {problem['input']!r} is not right: {problem['msg'].removeprefix('Value error, ')}"


def _is_union_tag(location: Sequence[Any], index: int) -> bool:
    """pydantic names the alternative of a union in the path; a user never wrote that."""
    part = location[index]
    if not isinstance(part, str):
        return False
    chosen = index > 0 and isinstance(location[index - 1], int) and part in _SOURCES
    return chosen or bool(re.search(r"^(list|tuple|dict)\[|^int$|^function-", part))


_SOURCES: dict[str, type[BaseModel]] = {
    "folder": FolderSource,
    "csv": CsvSource,
    "jsonl": JsonlSource,
    "huggingface": HubSource,
    "cache": CacheSource,
}


def _known_keys(location: Sequence[Any]) -> list[str]:
    section: type[BaseModel] = Config
    for index, part in enumerate(location):
        if _is_union_tag(location, index):
            section = _SOURCES.get(part, section)
        elif part in section.model_fields:
            section = next(_sections(section.model_fields[part].annotation), section)
    return sorted(section.model_fields)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field's type speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
