"""The model, where its embeddings are kept, and the adapter that trains."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from qflux.config.section import (
    DECIDES,
    DECIDES_IF_SET,
    FREE,
    MATCHES,
    NOTED,
    Folder,
    Names,
    Section,
)


class ModelSettings(Section):
    """Which weights, and in what precision they run."""

    pretrained: str = Field(description="a folder or a hub id in diffusers format", json_schema_extra=DECIDES)
    transformer: Folder | None = Field(
        default=None,
        description="a folder with another transformer, for example what a full fine-tuning wrote",
        json_schema_extra=MATCHES,
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16",
        description="of the arithmetic and of frozen weights; what trains is always float32",
        json_schema_extra=DECIDES,
    )
    quantization: Literal["int8", "nf4", "fp8"] | None = Field(
        default=None,
        description="of the frozen transformer: nf4 needs qflux[bitsandbytes], int8 and fp8 qflux[torchao]",
        json_schema_extra=DECIDES,
    )
    precision: Literal["auto", "fp8", "int8"] | None = Field(
        default=None,
        description="of products with frozen weights of blocks, forward and backward: fp8 (RTX 40, H100 and later) or "
        "int8 (RTX 30, A100 and later); auto: what the GPU can do; default: dtype",
        json_schema_extra=DECIDES,
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, …", json_schema_extra=FREE)
    max_sequence_length: int | None = Field(
        default=None,
        ge=1,
        description="text tokens at most; default: what the family takes",
        json_schema_extra=DECIDES,
    )
    on_long_prompt: Literal["error", "truncate"] = Field(
        default="error",
        description="what becomes of a longer prompt; those cut are counted",
        json_schema_extra=FREE,
    )


class CacheSettings(Section):
    """Where embeddings are kept."""

    use_cache: bool = Field(
        default=True, description="false: encode every sample again whenever it trains", json_schema_extra=FREE
    )
    batch_size: int = Field(
        default=1,
        ge=1,
        description="images or prompts encoded at once; above 1 results differ by rounding",
        json_schema_extra=FREE,
    )
    project_text: bool = Field(
        default=True,
        description="where prompts are wide, keep them as the transformer's own projection leaves them, "
        "in a third of the space, unless that trains or is quantized",
        json_schema_extra=FREE,
    )
    path: Folder | None = Field(default=None, description="default: <output_dir>/cache", json_schema_extra=FREE)


class LoraPattern(Section):
    """What layers of some names have instead of `lora.rank` and `lora.alpha`."""

    match: str = Field(
        min_length=1,
        description="a regular expression that is looked for in the names of layers, such as "
        "single_transformer_blocks\\.\\d+\\.proj_out",
        json_schema_extra=DECIDES,
    )
    rank: int | None = Field(
        default=None,
        ge=0,
        le=2048,
        description="of layers that match; 0: they do not train; default: lora.rank",
        json_schema_extra=DECIDES,
    )
    alpha: float | None = Field(
        default=None, gt=0, description="default: lora.alpha, and without that the rank", json_schema_extra=DECIDES
    )

    @field_validator("match")
    @classmethod
    def _is_an_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from None
        return value


class LoraSettings(Section):
    """The adapter that trains."""

    type: Literal["lora", "dora", "lokr", "loha"] = Field(
        default="lora", description="which kind of adapter", json_schema_extra=DECIDES
    )
    rank: int = Field(
        default=16, ge=1, le=2048, description="size of the adapter's inner dimension", json_schema_extra=DECIDES
    )
    alpha: float | None = Field(
        default=None, gt=0, description="default: the rank, so that the scale is 1", json_schema_extra=DECIDES
    )
    dropout: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="of the adapter's input while training", json_schema_extra=DECIDES
    )
    target_modules: Names | None = Field(
        default=None,
        min_length=1,
        description="layers, by the end of their names; default: the family's, mostly [to_q, to_k, to_v, to_out.0]",
        json_schema_extra=DECIDES,
    )
    patterns: tuple[LoraPattern, ...] = Field(
        default=(),
        strict=False,
        description="ranks of layers by regular expressions, on top of target_modules; of several that match a layer "
        "the last one counts",
        json_schema_extra=DECIDES_IF_SET,
    )
    init: Literal["gaussian", "kaiming"] = Field(
        default="gaussian",
        description="of the down projection of lora and dora; up is zero",
        json_schema_extra=DECIDES,
    )
    plus_ratio: float = Field(
        default=1.0,
        gt=0,
        description="LoRA+: the learning rate of up projections, over that of down projections; its authors use 16",
        json_schema_extra=DECIDES_IF_SET,
    )
    init_from: Folder | None = Field(
        default=None,
        description="a LoRA file or an adapter folder to start from instead; of this rank or less",
        json_schema_extra=NOTED,
    )
