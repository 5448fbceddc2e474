"""The training objective: one term per sample, and how the terms of a step become its loss.

Shapes: B samples, M target tokens of the micro-batch, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.config import LossSettings
from qflux.config.class_path import load_class, make
from qflux.data.batch import Batch
from qflux.errors import ConfigError
from qflux.losses.mse import MaskEditLoss, MseLoss
from qflux.losses.timesteps import level_weight


@dataclass(frozen=True)
class StepSize:
    """What the loss of an optimizer step is divided by: counts over all micro-batches and ranks, from the plan."""

    tokens: int
    """Target tokens."""
    samples: int


def sample_weight(settings: LossSettings, size: StepSize, tokens: int, sigma: float, is_prior: bool = False) -> float:
    """The weight of a sample's term in the loss of its step.

    With `normalize_by_valid_tokens` every target token of the step counts the same; without it every image does.
    """
    share = tokens / size.tokens if settings.normalize_by_valid_tokens else 1 / size.samples
    return share * level_weight(sigma, settings) * (settings.prior_weight if is_prior else 1.0)


def build_loss(settings: LossSettings) -> Callable[..., Tensor]:
    """The loss that a config names. ADD A LOSS HERE, and its name in `LossSettings.kind`.

    One of a user's own (`loss.class_path`) is called as those of `mse` are: `loss(prediction, target, edit_mask=mask,
    reduction="none")` with prediction and target `(M, C)` and mask `(M,)`, and returns errors `(M, C)` or `(M,)`.
    """
    if settings.class_path is not None:
        own = load_class("loss.class_path", settings.class_path, "check the name, and that its module can be imported.")
        if not inspect.isclass(own):
            raise ConfigError(f"loss.class_path: {settings.class_path} is no class", "name a class with a __call__.")
        loss = make("loss", own, settings.init_args)
        if not callable(loss):
            raise ConfigError(f"loss.class_path: {settings.class_path} can't be called", "give it a __call__.")
        return loss
    if settings.kind == "mask":
        weights = settings.mask_loss_fn
        return MaskEditLoss(weights.foreground_weight, weights.background_weight)
    return MseLoss()


class Objective:
    """Velocity error over the target tokens."""

    def __init__(self, settings: LossSettings) -> None:
        self._loss = build_loss(settings)

    def __call__(self, prediction: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The share of `batch` in the loss of its step, and the term `(B,)` of each sample.

        A term depends on its sample alone; summed over the micro-batches of a step the shares are that step's loss.
        """
        errors = self._loss(prediction, batch.velocity(), edit_mask=batch.mask, reduction="none")
        if errors.shape[:1] != prediction.shape[:1]:
            raise ConfigError(
                f"loss.class_path: {type(self._loss).__name__} returns {tuple(errors.shape)} for {len(prediction)} "
                "tokens",
                'with reduction="none" a loss returns a value per token.',
            )
        errors = errors.flatten(1).mean(-1) if errors.ndim > 1 else errors
        terms = torch.stack([error.mean() for error in errors.split(batch.target_lengths)])
        return (terms * batch.weight).sum(), terms
