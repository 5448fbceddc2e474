"""The whole configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from qflux.config.data import DataSettings
from qflux.config.section import Folder, Section, Seed
from qflux.config.training import (
    CacheSettings,
    LoraSettings,
    LossSettings,
    ModelSettings,
    OptimizerSettings,
    PredictSettings,
    TrainSettings,
    ValidationSettings,
)
from qflux.errors import redacted


class Config(Section):
    """Everything a run depends on."""

    family: Literal["flux-kontext", "qwen-image", "qwen-image-edit", "qwen-image-edit-plus"] = Field(
        default="flux-kontext", description="which kind of model"
    )
    output_dir: Folder = Field(default=Path("runs"), description="where runs and the cache go")
    run_name: str = Field(
        default="run", pattern=r"^[\w][\w.-]*$", description="a folder of output_dir; `cache` is taken"
    )
    seed: Seed = Field(default=0, description="of everything random: equal seeds give equal runs")
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
    def _what_trains_is_not_quantized(self) -> Config:
        if self.model.quantization and self.train.method == "full":
            raise ValueError("train.method: full trains every weight, and model.quantization freezes them; set one")
        if self.model.quantization == "fp8" and self.train.compile:
            raise ValueError(
                "model.quantization: fp8 and train.compile do not go together: compilation of a 12B model does not end "
                "its first step in minutes; use one of them, or int8"
            )
        if self.model.quantization == "nf4" and self.lora.type in ("lokr", "loha"):
            raise ValueError(f"lora.type: {self.lora.type} can't be put on an nf4 base; use fp8, int8 or another type")
        if self.model.quantization and self.train.distributed == "fsdp":
            raise ValueError("model.quantization and train.distributed: fsdp do not go together; use ddp")
        if self.train.distributed == "fsdp" and self.optimizer.class_path.startswith("prodigyopt."):
            raise ValueError("Prodigy sums over one process's shards and gets its step size wrong: no fsdp with it")
        return self

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


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redacted(value) if isinstance(value, str) else value
