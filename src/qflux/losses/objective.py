"""The training objective: one term per sample, and how the terms of a step become its loss.

Shapes: B samples, M target tokens of the micro-batch, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.config import LossSettings
from qflux.data.batch import EditBatch
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


class Objective:
    """Velocity error over the target tokens."""

    def __init__(self, settings: LossSettings) -> None:
        weights = settings.mask_loss_fn
        self._loss = (
            MaskEditLoss(weights.foreground_weight, weights.background_weight) if settings.use_mask_loss else MseLoss()
        )

    def __call__(self, prediction: Tensor, batch: EditBatch) -> tuple[Tensor, Tensor]:
        """The share of `batch` in the loss of its step, and the term `(B,)` of each sample.

        A term depends on its sample alone; summed over the micro-batches of a step the shares are that step's loss.
        """
        errors = self._loss(prediction, batch.velocity(), edit_mask=batch.mask, reduction="none").mean(-1)
        terms = torch.stack([error.mean() for error in errors.split(batch.target_lengths)])
        return (terms * batch.weight).sum(), terms
