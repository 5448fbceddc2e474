"""The optimizer and the loop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from qflux.config.section import (
    DECIDES,
    DECIDES_IF_SET,
    FREE,
    MATCHES,
    NOTED,
    Folder,
    Section,
)


class OptimizerSettings(Section):
    """Any torch-style optimizer."""

    class_path: str = Field(
        default="torch.optim.AdamW",
        pattern=r"^[\w.]+\.\w+$",
        description="its class, with the module",
        json_schema_extra=DECIDES,
    )
    init_args: dict[str, Any] = Field(
        default={"lr": 1e-4, "weight_decay": 1e-4},
        description="its arguments, the learning rate among them",
        json_schema_extra=DECIDES,
    )


class EmaSettings(Section):
    """A running average of what trains. It is what validates, and what the run ends with."""

    decay: float = Field(
        default=0.999, gt=0, lt=1, description="what remains of the average at each step", json_schema_extra=DECIDES
    )
    warmup: bool = Field(
        default=True,
        description="begin with a shorter memory: min(decay, (1 + steps) / (10 + steps))",
        json_schema_extra=DECIDES,
    )


class TrainSettings(Section):
    """The loop."""

    method: Literal["lora", "full"] = Field(
        default="lora", description="full: every weight of the transformer trains", json_schema_extra=DECIDES
    )
    max_train_steps: int | None = Field(
        default=None, ge=1, description="optimizer steps; wins over num_epochs", json_schema_extra=NOTED
    )
    num_epochs: int = Field(
        default=1, ge=1, description="passes over the data, unless max_train_steps is set", json_schema_extra=NOTED
    )
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, description="micro-batches of a process in a step", json_schema_extra=NOTED
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="longer gradients are shortened; null: never", json_schema_extra=DECIDES
    )
    lr_scheduler: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "piecewise_constant",
    ] = Field(
        default="constant",
        description="how the learning rate changes over the run; those of diffusers",
        json_schema_extra=DECIDES,
    )
    lr_warmup_steps: int = Field(default=0, ge=0, description="optimizer steps", json_schema_extra=DECIDES)
    lr_num_cycles: int = Field(default=1, ge=1, description="of cosine_with_restarts", json_schema_extra=MATCHES)
    lr_power: float = Field(default=1.0, gt=0, description="of polynomial", json_schema_extra=MATCHES)
    lr_step_rules: str | None = Field(
        default=None,
        description='of piecewise_constant: "1:100,0.1:200,0.01" is a tenth from step 100 on, and so on',
        json_schema_extra=MATCHES,
    )
    ema: EmaSettings | None = Field(
        default=None, description="a running average of what trains; {} for its defaults", json_schema_extra=DECIDES
    )
    on_nan: Literal["stop", "skip"] = Field(
        default="stop",
        description="a loss or gradient that is NaN or infinite: save and stop, or skip the step and count",
        json_schema_extra=FREE,
    )
    guidance: float = Field(
        default=3.5, description="guidance value given to a guidance-distilled model", json_schema_extra=DECIDES
    )
    caption_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of visits with an empty prompt", json_schema_extra=DECIDES
    )
    control_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of visits without control images", json_schema_extra=DECIDES
    )
    noises_per_sample: int = Field(
        default=1,
        ge=1,
        le=64,
        description="noisy targets of a sample at each visit, all in one micro-batch; text and controls are computed "
        "once for all of them where they do not see the target, elsewhere once for each",
        json_schema_extra=DECIDES_IF_SET,
    )
    tokens_per_pass: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        default="auto",
        description="tokens that run at once at most; a step is cut into such passes, with the same result. auto: what "
        "fits; null: a pass is a micro-batch",
        json_schema_extra=FREE,
    )
    gradient_checkpointing: bool | int | Literal["auto"] = Field(
        default="auto",
        description="true: every block computes its activations again; k: every k-th; false: none; auto: as many as "
        "must",
        json_schema_extra=FREE,
    )
    streamed_blocks: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="blocks whose frozen weights stay in host memory and are copied to the GPU when it is their turn; "
        "they are recomputed. auto: as many as must",
        json_schema_extra=FREE,
    )
    keep_attention: bool | Literal["auto"] = Field(
        default="auto",
        description="recomputed blocks keep what attention gave, as large as their input, and do not compute it again. "
        "auto: where there is room",
        json_schema_extra=FREE,
    )
    offload_inputs: bool | Literal["auto"] = Field(
        default="auto",
        description="inputs of recomputed blocks wait in host memory. auto: where that lets a step run faster",
        json_schema_extra=FREE,
    )
    compile: bool | Literal["auto"] = Field(
        default="auto",
        description="torch.compile of each block; sizes may vary freely. auto: on a GPU",
        json_schema_extra=FREE,
    )
    execution: Literal["packed", "padded"] = Field(
        default="packed", description="padded is the slow reference", json_schema_extra=FREE
    )
    deterministic: bool = Field(
        default=False,
        description="on a GPU: only kernels that repeat to the last bit; attention is slower",
        json_schema_extra=FREE,
    )
    distributed: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="with several processes: each holds the model, or each holds a share of it (FSDP2)",
        json_schema_extra=FREE,
    )
    checkpoint_every: int = Field(
        default=250,
        ge=1,
        description="optimizer steps; the run validates as often, unless validation.every says otherwise",
        json_schema_extra=FREE,
    )
    resume_from: Folder | None = Field(
        default=None,
        description="a checkpoint (runs/…/checkpoints/step-…) that a new run goes on from, its optimizer and all; a "
        "run that has checkpoints of its own goes on from those",
        json_schema_extra=FREE,
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="the newest so many, and the best by held-out loss", json_schema_extra=FREE
    )
    preflight: bool = Field(
        default=True, description="try the largest batch, a save and an image before the run", json_schema_extra=FREE
    )
    trackers: list[Literal["tensorboard", "wandb", "swanlab"]] = Field(
        default=[],
        description="besides metrics.jsonl; each needs the extra of its name",
        json_schema_extra=FREE,
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> TrainSettings:
        if self.lr_warmup_steps and self.lr_scheduler in ("constant", "piecewise_constant"):
            raise ValueError(
                f"lr_warmup_steps has no effect on lr_scheduler {self.lr_scheduler}; use constant_with_warmup"
            )
        if (self.lr_step_rules is None) == (self.lr_scheduler == "piecewise_constant"):
            raise ValueError("lr_step_rules and lr_scheduler: piecewise_constant go together")
        if self.lr_num_cycles != 1 and self.lr_scheduler != "cosine_with_restarts":
            raise ValueError("lr_num_cycles is for lr_scheduler: cosine_with_restarts")
        if self.lr_power != 1.0 and self.lr_scheduler != "polynomial":
            raise ValueError("lr_power is for lr_scheduler: polynomial")
        for name in ("keep_attention", "offload_inputs"):
            if getattr(self, name) is True and self.gradient_checkpointing is False:
                raise ValueError(f"{name} is about recomputed blocks, and gradient_checkpointing is false")
        asked = self.gradient_checkpointing
        if not isinstance(asked, bool | str) and asked < 2:
            raise ValueError(
                "gradient_checkpointing is auto, true, false, or a number k of at least 2: every k-th block"
            )
        return self
