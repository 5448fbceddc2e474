"""The model, what of it trains, the loop, the objective, validation and prediction."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from qflux.config.section import (
    DECIDES,
    DECIDES_IF_SET,
    FREE,
    MATCHES,
    NOTED,
    Folder,
    Names,
    Paths,
    Section,
    Seed,
    Size,
    Texts,
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
    path: Folder | None = Field(default=None, description="default: <output_dir>/cache", json_schema_extra=FREE)


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
    init: Literal["gaussian", "kaiming"] = Field(
        default="gaussian",
        description="of the down projection of lora and dora; up is zero",
        json_schema_extra=DECIDES,
    )
    init_from: Folder | None = Field(
        default=None,
        description="a LoRA file or an adapter folder to start from instead; of this rank or less",
        json_schema_extra=NOTED,
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
    gradient_checkpointing: bool | int = Field(
        default=True,
        description="true: every block computes its activations again; k: every k-th; false: none",
        json_schema_extra=FREE,
    )
    compile: bool = Field(
        default=False, description="torch.compile of each block; sizes may vary freely", json_schema_extra=FREE
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
        default=250, ge=1, description="optimizer steps; the run validates as often", json_schema_extra=FREE
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
        if not isinstance(self.gradient_checkpointing, bool) and self.gradient_checkpointing < 2:
            raise ValueError("gradient_checkpointing is true, false, or a number k of at least 2: every k-th block")
        return self


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
    """What happens at every checkpoint: the held-out samples (data.held_out) are measured, and edits are drawn."""

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
    num_inference_steps: int | None = Field(
        default=None, ge=1, description="default: as for predict", json_schema_extra=FREE
    )
    true_cfg_scale: float = Field(
        default=1.0,
        ge=1,
        description="above 1: against the empty prompt, which the cache then holds too",
        json_schema_extra=FREE,
    )


class MaskLossSettings(Section):
    """How much the edited region and the rest count."""

    foreground_weight: float = Field(
        default=2.0, ge=0, description="of tokens that the mask marks", json_schema_extra=DECIDES
    )
    background_weight: float = Field(default=1.0, ge=0, description="of the others", json_schema_extra=DECIDES)


class TimestepSettings(Section):
    """How the noise level of a sample is drawn."""

    density: Literal["uniform", "logit_normal", "mode", "cosmap", "sigma_sqrt"] = Field(
        default="logit_normal",
        description="cosmap and sigma_sqrt are uniform with the loss weighting of that name",
        json_schema_extra=DECIDES,
    )
    mean: float = Field(default=0.0, description="of logit_normal", json_schema_extra=DECIDES)
    std: float = Field(default=1.0, gt=0, description="of logit_normal", json_schema_extra=DECIDES)
    mode_scale: float = Field(
        default=1.29,
        ge=-1,
        le=1.75,
        description="of mode; beyond this range it has no density",
        json_schema_extra=DECIDES,
    )
    shift: Literal["none", "fixed", "resolution"] = Field(
        default="resolution",
        description="resolution: from the sample's own target tokens",
        json_schema_extra=DECIDES,
    )
    fixed_shift: float = Field(default=3.0, gt=0, description="of shift: fixed", json_schema_extra=DECIDES)

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> TimestepSettings:
        needs = {"mean": "logit_normal", "std": "logit_normal", "mode_scale": "mode"}
        for name, density in needs.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.density != density:
                raise ValueError(f"{name} is for density: {density}, and density is {self.density}")
        if self.fixed_shift != 3.0 and self.shift != "fixed":
            raise ValueError(f"fixed_shift is for shift: fixed, and shift is {self.shift}")
        return self


class LossSettings(Section):
    """The objective."""

    kind: Literal["mse", "mask"] = Field(
        default="mse",
        description="mse: squared error of the velocity; mask: the same, with weights for edited and other tokens",
        json_schema_extra=FREE,  # use_mask_loss says the same to resumed runs and in files
    )
    use_mask_loss: bool = Field(default=False, description="another spelling of kind: mask", json_schema_extra=DECIDES)
    mask_loss_fn: MaskLossSettings = Field(default=MaskLossSettings(), description="weights of edited and other tokens")
    class_path: str | None = Field(
        default=None,
        pattern=r"^[\w.]+\.\w+$",
        description="a loss of your own instead: its class, with the module (docs/training.md)",
        json_schema_extra=DECIDES_IF_SET,
    )
    init_args: dict[str, Any] = Field(default={}, description="its arguments", json_schema_extra=DECIDES_IF_SET)
    normalize_by_valid_tokens: bool = Field(
        default=True,
        description="true: every token counts the same; false: every image counts the same",
        json_schema_extra=DECIDES,
    )
    weighting: Literal["none", "cosmap", "sigma_sqrt"] | None = Field(
        default=None,
        description="of noise levels, as in SD3; default: what timesteps.density calls for",
        json_schema_extra=DECIDES,
    )
    prior_weight: float = Field(
        default=1.0, ge=0, description="of the class images' loss, if there are any", json_schema_extra=DECIDES
    )
    timesteps: TimestepSettings = Field(default=TimestepSettings(), description="how noise levels are drawn")

    @model_validator(mode="before")
    @classmethod
    def _two_spellings(cls, values: Any) -> Any:
        """`kind: mask` and `use_mask_loss: true` say the same; whichever is given, both are set."""
        if not isinstance(values, dict):
            return values
        if values.get("kind") == "mse" and values.get("use_mask_loss") is True:
            raise ValueError("kind: mse and use_mask_loss: true contradict each other; set one of them")
        masked = values.get("kind") == "mask" or values.get("use_mask_loss") is True
        return {**values, "kind": "mask", "use_mask_loss": True} if masked else values

    @model_validator(mode="after")
    def _one_loss(self) -> LossSettings:
        if self.class_path is not None and self.kind == "mask":
            raise ValueError("class_path names a loss of your own, and kind another one; set one of them")
        if self.init_args and self.class_path is None:
            raise ValueError("init_args are for class_path")
        return self


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
    lora: Paths = Field(default=(), description="LoRA files or adapter folders to use when the command names none")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description="edits at once at most; default: as max_tokens allows",
        json_schema_extra=FREE,
    )
    num_inference_steps: int | None = Field(
        default=None, ge=1, description="default: the family's", json_schema_extra=FREE
    )
    guidance_scale: float = Field(default=3.5, description="told to guidance-distilled models", json_schema_extra=FREE)
    negative_prompt: str | None = Field(
        default=None, description="switches true CFG on; may be a space", json_schema_extra=FREE
    )
    true_cfg_scale: float | None = Field(
        default=None, description="default: the family's; 1 is off", json_schema_extra=FREE
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
