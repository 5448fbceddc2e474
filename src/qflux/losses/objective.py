"""The training objective of one micro-batch, as its share of the whole optimizer step.

Shapes: B samples, M target tokens of the micro-batch, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qflux.config import LossSettings
from qflux.data.batch import EditBatch
from qflux.losses.mse import MaskEditLoss, MseLoss


class Objective:
    """Velocity error over the target tokens. Summed over the micro-batches of a step it is that step's loss.

    With `normalize_by_valid_tokens` every target token of the step counts the same; without it every image does.
    """

    def __init__(self, settings: LossSettings) -> None:
        weights = settings.mask_loss_fn
        self._loss = (
            MaskEditLoss(weights.foreground_weight, weights.background_weight) if settings.use_mask_loss else MseLoss()
        )
        self._by_token = settings.normalize_by_valid_tokens

    def __call__(self, prediction: Tensor, batch: EditBatch, step_tokens: int, step_samples: int) -> Tensor:
        """The share of `batch` in the loss of a step of `step_tokens` target tokens and `step_samples` samples."""
        weighting = batch.weight[batch.target_sample]
        elements = self._loss(prediction, batch.velocity(), edit_mask=batch.mask, weighting=weighting, reduction="none")
        per_token = elements.mean(-1)
        if self._by_token:
            return per_token.sum() / step_tokens
        lengths = torch.tensor(batch.target_lengths, device=per_token.device)
        return (per_token / lengths[batch.target_sample]).sum() / step_samples
