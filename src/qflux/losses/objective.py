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
    """Velocity error over the target tokens, and what an edit is to leave alone."""

    def __init__(self, settings: LossSettings, always_asks: bool = False) -> None:
        """With `always_asks`, the base is asked about every batch if about any: processes that share it are in step."""
        self._loss = build_loss(settings)
        self._preserve = settings.preserve
        self.looks = int(self._preserve.toward == "base" or (always_asks and self._preserve.blank > 0))
        """Forward passes of every batch besides, without the adapter."""

    def asks_base(self, batch: Batch) -> bool:
        """Whether it needs what the model predicts for a batch without the adapter."""
        return self.looks > 0 or batch.blank is not None

    def __call__(self, prediction: Tensor, batch: Batch, base: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The share of `batch` in the loss of its step, and the term `(B,)` of each sample.

        A term depends on its sample alone; summed over the micro-batches of a step the shares are that step's loss.
        `base` `(M, C)` is what the model predicts without the adapter, if that is asked for.
        """
        goal = batch.velocity()
        if batch.blank is not None:
            assert base is not None
            goal = torch.where(batch.blank[batch.target][:, None], base.to(goal.dtype), goal)
        errors = self._errors(prediction, goal, batch)
        if self._preserve.weight > 0:
            errors = self._preserved(errors, prediction, batch, base)
        terms = torch.stack([error.mean() for error in errors.split(batch.target_lengths)])
        return (terms * batch.weight).sum(), terms

    def _errors(self, prediction: Tensor, goal: Tensor, batch: Batch) -> Tensor:
        """`(M,)`"""
        errors = self._loss(prediction, goal, edit_mask=batch.mask, reduction="none")
        if errors.shape[:1] != prediction.shape[:1]:
            raise ConfigError(
                f"loss.class_path: {type(self._loss).__name__} returns {tuple(errors.shape)} for {len(prediction)} "
                "tokens",
                'with reduction="none" a loss returns a value per token.',
            )
        return errors.flatten(1).mean(-1) if errors.ndim > 1 else errors

    def _preserved(self, errors: Tensor, prediction: Tensor, batch: Batch, base: Tensor | None) -> Tensor:
        """With the weight of tokens outside of the edited region, and their goal if that is the base's.

        If it is the control, the targets show it there already (`EncodedSample.keeping_the_rest`).
        """
        edited = batch.mask > 0  # a token that the region touches belongs to it: half an edit is none
        if batch.blank is not None:  # those are held to the base as a whole already
            edited = edited | batch.blank[batch.target]
        stays = errors
        if self._preserve.toward == "base":
            assert base is not None
            stays = self._errors(prediction, base, batch)
        return torch.where(edited, errors, self._preserve.weight * stays)
