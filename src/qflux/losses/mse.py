"""Squared-error losses over tokens, padded `(B, S, C)` or packed `(M, C)`.

All are called `loss(model_pred, target, attention_mask=None, edit_mask=None, weighting=None, reduction="mean")`:
`attention_mask` and `edit_mask` have one value per token, `weighting` one per sample (padded) or per token (packed).
"mean" divides by the number of valid elements; weights scale terms and do not enter the denominator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["none", "mean", "sum"]


class MseLoss:
    """Mean squared error over valid tokens."""

    def __call__(
        self,
        model_pred: Tensor,
        target: Tensor,
        attention_mask: Tensor | None = None,
        edit_mask: Tensor | None = None,
        weighting: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> Tensor:
        if model_pred.shape != target.shape:
            raise ValueError(f"prediction {tuple(model_pred.shape)} and target {tuple(target.shape)} differ in shape")
        if attention_mask is not None:
            # before the subtraction: padding may hold anything, even NaN, and must get exactly zero gradient
            valid = attention_mask.bool().unsqueeze(-1)
            model_pred, target = (torch.where(valid, x, 0.0) for x in (model_pred, target))
        error = (model_pred.float() - target.float()).square()
        error = error * self.token_weight(edit_mask)
        if weighting is not None:
            error = error * weighting.reshape(weighting.shape + (1,) * (error.ndim - weighting.ndim))
        if reduction == "none":
            return error
        if reduction == "sum":
            return error.sum()
        if attention_mask is None:
            return error.mean()
        return error.sum() / (valid.sum() * error.shape[-1]).clamp(min=1)

    def token_weight(self, edit_mask: Tensor | None) -> Tensor | float:
        """The weight of each token, broadcastable to its channels."""
        return 1.0


class MaskEditLoss(MseLoss):
    """Squared error with one weight inside the edited region and another outside; masks between 0 and 1 blend them.

    Without a mask everything counts as edited.
    """

    def __init__(self, foreground_weight: float = 2.0, background_weight: float = 1.0) -> None:
        self.foreground_weight = foreground_weight
        self.background_weight = background_weight

    def token_weight(self, edit_mask: Tensor | None) -> Tensor | float:
        if edit_mask is None:
            return self.foreground_weight
        mask = edit_mask.float().unsqueeze(-1)
        return mask * self.foreground_weight + (1 - mask) * self.background_weight


class AttentionMaskMseLoss(MaskEditLoss):
    """Both masks at once: valid tokens only, weighted by region."""

    def __init__(self, foreground_weight: float = 1.0, background_weight: float = 1.0) -> None:
        super().__init__(foreground_weight, background_weight)
