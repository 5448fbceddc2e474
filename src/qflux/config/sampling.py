"""What is drawn: at every checkpoint, and by `qflux predict`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qflux.config.section import (
    FREE,
    Folder,
    Paths,
    Section,
    Seed,
    Size,
    Texts,
)


class OwnEdit(Section):
    """An edit of somebody's own, drawn at every checkpoint."""

    prompt: str = Field(min_length=1, description="the instruction", json_schema_extra=FREE)
    images: Paths = Field(
        default=(),
        description="control images, the one to edit first: a path, or a list of paths",
        json_schema_extra=FREE,
    )
    name: str | None = Field(
        default=None, description="what it is called; default: the image's name", json_schema_extra=FREE
    )
    seed: Seed = Field(default=0, description="of the noise it starts from", json_schema_extra=FREE)


class ValidationSettings(Section):
    """What happens at every checkpoint, or as often as `every` says: the held-out samples (data.held_out) are measured,
    and edits are drawn."""

    every: int | None = Field(
        default=None,
        ge=1,
        description="optimizer steps; default: at every checkpoint. The best adapter is chosen where both fall "
        "together",
        json_schema_extra=FREE,
    )

    noise_levels: int = Field(
        default=4, ge=1, le=100, description="at which each sample's loss is measured", json_schema_extra=FREE
    )
    max_samples: int | None = Field(
        default=None, ge=1, description="of the held-out loss; default: all", json_schema_extra=FREE
    )
    images: int = Field(
        default=4, ge=0, description="held-out edits that are drawn, as one batch", json_schema_extra=FREE
    )
    edits: tuple[OwnEdit, ...] = Field(
        default=(),
        strict=False,
        description="images and prompts of your own to draw as well; no held-out data is needed",
        json_schema_extra=FREE,
    )
    perceptual: dict[str, str] = Field(
        default={},
        description="networks that compare edits with wanted images, by a name of your own: {dino: "
        "facebook/dinov2-base}; a folder or a hub id; also for predict --compare",
        json_schema_extra=FREE,
    )
    num_inference_steps: int | None = Field(
        default=None, ge=1, description="default: as for predict", json_schema_extra=FREE
    )
    true_cfg_scale: float = Field(
        default=1.0,
        ge=1,
        description="above 1: against the empty prompt, which the cache then holds too",
        json_schema_extra=FREE,
    )


class PredictSettings(Section):
    """Defaults of `qflux predict`, and what it does if it is told nothing else."""

    prompts: Texts = Field(
        default=(),
        description="edits to make when the command names none: one prompt, or several",
        json_schema_extra=FREE,
    )
    images: tuple[Paths, ...] = Field(
        default=(),
        strict=False,
        description="control images of each of these prompts: a path, or a list of paths",
        json_schema_extra=FREE,
    )
    output: Folder | None = Field(
        default=None, description="where these edits go; default: the folder predictions", json_schema_extra=FREE
    )
    lora: Paths = Field(
        default=(),
        description="LoRA files or adapter folders to use when the command names none",
        json_schema_extra=FREE,
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description="edits at once at most; default: as max_tokens allows",
        json_schema_extra=FREE,
    )
    num_inference_steps: int | None = Field(
        default=None, ge=1, description="default: the checkpoint's", json_schema_extra=FREE
    )
    keep_prefix: bool = Field(
        default=True,
        description="run text and controls once per edit where they do not see the target, and keep what they are "
        "seen by; false takes less memory",
        json_schema_extra=FREE,
    )
    guidance_scale: float | None = Field(
        default=None, description="told to guidance-distilled models; default: the checkpoint's", json_schema_extra=FREE
    )
    negative_prompt: str | None = Field(
        default=None,
        description="switches true CFG on; may be a space; default: the checkpoint's, most have none",
        json_schema_extra=FREE,
    )
    true_cfg_scale: float | None = Field(
        default=None, description="default: the checkpoint's; 1 is off", json_schema_extra=FREE
    )
    max_tokens: int = Field(
        default=32768,
        ge=1,
        description="image tokens of a batch of jobs; a larger job runs alone",
        json_schema_extra=FREE,
    )
    size: Literal["input"] | Size | None = Field(
        default=None,
        description="[height, width] of results, to which the image to edit is brought too; input: that image's own "
        "size; default: what preprocessing makes of that image",
        json_schema_extra=FREE,
    )
    preprocessing: Literal["lora", "pipeline", "config"] = Field(
        default="lora",
        description="how images reach their size: as the LoRA was trained, if its file says so, else as in diffusers' "
        "pipeline; pipeline: always that; config: as data.processor says",
        json_schema_extra=FREE,
    )
    seed: Seed = Field(default=0, description="of the noise an edit starts from", json_schema_extra=FREE)
