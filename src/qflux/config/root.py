"""The whole configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from qflux.config.data import DataSettings
from qflux.config.loss import LossSettings
from qflux.config.model import CacheSettings, LoraSettings, ModelSettings
from qflux.config.sampling import PredictSettings, ValidationSettings
from qflux.config.section import DECIDES, FREE, Folder, Marks, Memory, Section, Seed
from qflux.config.training import OptimizerSettings, TrainSettings
from qflux.errors import redacted
from qflux.models import registry

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[registry.names()]


class Config(Section):
    """Everything a run depends on."""

    family: FamilyName = Field(default=registry.DEFAULT, description="which kind of model", json_schema_extra=DECIDES)
    output_dir: Folder = Field(default=Path("runs"), description="where runs and the cache go", json_schema_extra=FREE)
    run_name: str = Field(
        default="run",
        pattern=r"^[\w][\w.-]*$",
        description="a folder of output_dir; `cache` is taken",
        json_schema_extra=FREE,
    )
    seed: Seed = Field(
        default=0, description="of everything random: equal seeds give equal runs", json_schema_extra=DECIDES
    )
    memory: Memory | None = Field(
        default=None,
        description='what a run may take of the GPU, such as "16GB"; default: what is free',
        json_schema_extra=FREE,
    )
    model: ModelSettings = Field(description="which weights, and in what precision")
    data: DataSettings = Field(description="where the samples are")
    cache: CacheSettings = Field(default=CacheSettings(), description="where embeddings are kept")
    lora: LoraSettings = Field(default=LoraSettings(), description="the adapter that trains")
    optimizer: OptimizerSettings = Field(default=OptimizerSettings(), description="any torch-style optimizer")
    train: TrainSettings = Field(default=TrainSettings(), description="the loop")
    loss: LossSettings = Field(default=LossSettings(), description="the objective")
    validation: ValidationSettings = Field(default=ValidationSettings(), description="what checkpoints are measured by")
    predict: PredictSettings = Field(default=PredictSettings(), description="defaults of `qflux predict`")

    @model_validator(mode="after")
    def _cache_is_no_run(self) -> Config:
        if self.run_name == "cache" and self.cache.path is None:
            raise ValueError("run_name: cache is the folder of the embedding cache; choose another name")
        return self

    @model_validator(mode="after")
    def _there_is_something_to_validate(self) -> Config:
        if self.validation.every is not None and not self.data.held_out and not self.validation.edits:
            raise ValueError("validation.every has no effect: nothing is held out, and there are no validation.edits")
        return self

    @model_validator(mode="after")
    def _what_trains_is_not_quantized(self) -> Config:
        if self.model.quantization and self.train.method == "full":
            raise ValueError("train.method: full trains every weight, and model.quantization freezes them; set one")
        if self.model.quantization == "fp8" and self.train.compile is True:
            raise ValueError(
                "model.quantization: fp8 and train.compile do not go together: compilation of a 12B model does not end "
                "its first step in minutes; use one of them, or int8"
            )
        if self.lora.plus_ratio != 1 and (self.train.method == "full" or self.lora.type in ("lokr", "loha")):
            raise ValueError("lora.plus_ratio is for lora and dora: nothing else has up and down projections")
        if self.lora.init_from is not None and self.train.method == "full":
            raise ValueError("lora.init_from has no effect with train.method: full, which trains no LoRA")
        if self.lora.patterns and (self.train.method == "full" or self.lora.type in ("lokr", "loha")):
            raise ValueError("lora.patterns are for lora and dora")
        if (self.loss.preserve.blank or self.loss.preserve.toward == "base") and self.train.method == "full":
            raise ValueError(
                "loss.preserve holds a LoRA to the model without it, and train.method: full leaves no such model; "
                "use toward: control, and blank: 0"
            )
        if self.model.quantization == "nf4" and self.lora.type in ("lokr", "loha"):
            raise ValueError(f"lora.type: {self.lora.type} can't be put on an nf4 base; use fp8, int8 or another type")
        if self.train.streamed_blocks not in ("auto", 0):
            if self.train.method == "full" or self.train.distributed == "fsdp" or self.model.quantization == "nf4":
                raise ValueError(
                    "train.streamed_blocks is for a LoRA over a base that is not sharded, and not quantized to nf4: "
                    "what trains has to stay, FSDP moves its own, and bitsandbytes keeps scales apart from weights"
                )
            if self.train.gradient_checkpointing not in ("auto", True):
                raise ValueError("train.streamed_blocks need train.gradient_checkpointing: auto or true")
        if self.model.quantization and self.train.distributed == "fsdp":
            raise ValueError("model.quantization and train.distributed: fsdp do not go together; use ddp")
        if self.train.distributed == "fsdp" and self.optimizer.class_path.startswith("prodigyopt."):
            raise ValueError("Prodigy sums over one process's shards and gets its step size wrong: no fsdp with it")
        return self

    @model_validator(mode="after")
    def _what_is_frozen_may_compute_in_eight_bits(self) -> Config:
        if self.model.precision and self.train.method == "full":
            raise ValueError("train.method: full trains every weight, and model.precision is for frozen ones; set one")
        if self.model.precision and self.model.quantization:
            raise ValueError(
                "model.precision and model.quantization both say how the base is kept; the first also computes in 8 "
                "bits, which is faster: leave out the second"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit_the_family(self) -> Config:
        multiple, processor = registry.facts_of(self.family).size_multiple, self.data.processor
        named: dict[str, Sequence[Any]] = {
            "data.processor.target_size": [processor.target_size],
            "data.processor.controls_size": processor.controls_size or [],
            "predict.size": [self.predict.size],
        }
        areas = processor.multi_resolutions
        if areas and areas.preset and not processor.target_size:
            named["data.processor.multi_resolutions"] = registry.size_presets()[areas.preset]
        for name, sizes in named.items():
            for size in sizes:
                if isinstance(size, tuple) and any(side % multiple for side in size):
                    raise ValueError(f"{name}: {list(size)} are not multiples of {multiple}, as {self.family} needs")
        return self

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The layers that train: those of the config, or the family's own."""
        return self.lora.target_modules or registry.facts_of(self.family).lora_targets

    @property
    def projects_text(self) -> bool:
        """Text is cached as the transformer's own projection leaves it: that is frozen, and the same as in training."""
        layer = registry.facts_of(self.family).text_projection
        if layer is None or not self.cache.project_text or self.model.quantization is not None:
            return False
        trains = any(layer == target or layer.endswith(f".{target}") for target in self.lora_targets)
        for pattern in self.lora.patterns:
            if re.search(pattern.match, layer):
                trains = pattern.rank != 0
        return self.train.method == "lora" and not trains

    def completed(self) -> Config:
        """The same with the family's own values where a config leaves open what its result depends on."""
        return self.model_copy(update={"lora": self.lora.model_copy(update={"target_modules": self.lora_targets})})

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.run_name

    @property
    def cache_dir(self) -> Path:
        return self.cache.path or self.output_dir / "cache"

    def dump(self) -> dict[str, Any]:
        """Plain values, as they would stand in a config file; without secrets that somebody has put into addresses."""
        values: dict[str, Any] = _redacted(self.model_dump(mode="json"))
        return values

    def marked(self, mark: Literal["resume", "record"]) -> dict[str, Any]:
        """The settings whose fields say that a resumed run must share them, or that a LoRA file records them."""
        return _marked(self, self.dump(), mark)


def _marked(section: Section, values: dict[str, Any], mark: str) -> dict[str, Any]:
    found = {}
    for name, field in type(section).model_fields.items():
        marks, value = field.json_schema_extra, getattr(section, name)
        if isinstance(marks, Marks):
            is_left_out = (marks.if_set and value == field.default) or value in marks.unless
            if getattr(marks, mark) and not is_left_out:
                found[name] = values[name]
        elif isinstance(value, Section):
            inner = _marked(value, values[name], mark)
            found |= {name: inner} if inner else {}
    return found


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redacted(value) if isinstance(value, str) else value
