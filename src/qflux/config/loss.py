"""The objective: which loss, and how noise levels are drawn."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from qflux.config.section import (
    DECIDES,
    DECIDES_IF_SET,
    Marks,
    Section,
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
    low: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="no noise level below this is drawn, after the shift; those above are drawn as before, more often",
        json_schema_extra=DECIDES_IF_SET,
    )
    high: float = Field(
        default=1.0, gt=0, le=1, description="no noise level above this is drawn", json_schema_extra=DECIDES_IF_SET
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> TimestepSettings:
        needs = {"mean": "logit_normal", "std": "logit_normal", "mode_scale": "mode"}
        for name, density in needs.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.density != density:
                raise ValueError(f"{name} is for density: {density}, and density is {self.density}")
        if self.fixed_shift != 3.0 and self.shift != "fixed":
            raise ValueError(f"fixed_shift is for shift: fixed, and shift is {self.shift}")
        if self.high - self.low < 0.001:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}: there is no noise level between them")
        return self


class PreserveSettings(Section):
    """What an edit is to leave alone."""

    weight: float = Field(
        default=0.0,
        ge=0,
        description="of tokens outside of the edited region, whose goal is to stay; 0: their goal is the target, as "
        "everywhere, and nothing is preserved",
        json_schema_extra=DECIDES_IF_SET,
    )
    toward: Literal["control", "base"] = Field(
        default="control",
        description="control: they stay as in the first control; base: the model predicts there what it does without "
        "the adapter",
        json_schema_extra=DECIDES_IF_SET,
    )
    blank: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of visits without a prompt, in which the model is held to what it predicts without the "
        "adapter, everywhere",
        json_schema_extra=DECIDES_IF_SET,
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> PreserveSettings:
        if self.toward == "base" and not self.weight:
            raise ValueError("toward has no effect without a weight")
        return self


class LossSettings(Section):
    """The objective."""

    kind: Literal["mse", "mask"] = Field(
        default="mse",
        description="mse: squared error of the velocity; mask: the same, with weights for edited and other tokens",
        json_schema_extra=Marks(resume=True, record=True, unless=("mse", "mask")),  # use_mask_loss says it for these
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
    preserve: PreserveSettings = Field(default=PreserveSettings(), description="what an edit is to leave alone")

    @model_validator(mode="before")
    @classmethod
    def _two_spellings(cls, values: Any) -> Any:
        """`kind: mask` and `use_mask_loss: true` say the same; whichever is given, both are set."""
        if not isinstance(values, dict):
            return values
        kind, masked = values.get("kind"), values.get("use_mask_loss")
        if kind is not None and isinstance(masked, bool) and masked != (kind == "mask"):
            spelled = str(masked).lower()
            raise ValueError(f"kind: {kind} and use_mask_loss: {spelled} contradict each other; set one of them")
        is_masked = kind == "mask" or masked is True
        return {**values, "kind": "mask", "use_mask_loss": True} if is_masked else values

    @model_validator(mode="after")
    def _one_loss(self) -> LossSettings:
        if self.class_path is not None and self.kind != "mse":
            raise ValueError("class_path names a loss of your own, and kind another one; set one of them")
        if self.init_args and self.class_path is None:
            raise ValueError("init_args are for class_path")
        return self
