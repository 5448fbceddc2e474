"""Squared-error losses over tokens, padded `(B, S, C)` or packed `(M, C)`.

All are called `loss(model_pred, target, attention_mask=None, edit_mask=None, weighting=None, reduction="mean")`:
`attention_mask` and `edit_mask` have one value per token, `weighting` one per sample (padded) or per token (packed).
"mean" divides by the number of valid elements; weights scale terms and do not enter the denominator. A mask of fewer
samples, `(1, S)` or `(S,)`, holds for all of them. Older calls `loss(mask=…, model_pred=…, target=…)` are understood.
"""

from __future__ import annotations

import warnings
from typing import Literal, get_args

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
        mask: Tensor | None = None,
    ) -> Tensor:
        if reduction not in get_args(Reduction):
            raise ValueError(f"reduction is {reduction!r}; it is one of {', '.join(get_args(Reduction))}")
        if mask is not None:
            if edit_mask is not None:
                raise ValueError("the edit mask is given twice: as edit_mask and as mask")
            warnings.warn("mask=… is understood, but deprecated: pass edit_mask=…", FutureWarning, stacklevel=2)
            edit_mask = mask
        if model_pred.shape != target.shape:
            raise ValueError(f"prediction {tuple(model_pred.shape)} and target {tuple(target.shape)} differ in shape")
        if attention_mask is not None:
            # before the subtraction: padding may hold anything, even NaN, and must get exactly zero gradient
            valid = _per_token("attention_mask", attention_mask, model_pred).bool().unsqueeze(-1)
            model_pred, target = (torch.where(valid, x, 0.0) for x in (model_pred, target))
        error = (model_pred.float() - target.float()).square()
        edit_mask = None if edit_mask is None else _per_token("edit_mask", edit_mask, error)
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


def _per_token(name: str, mask: Tensor, tokens: Tensor) -> Tensor:
    """A mask with one value for each of `tokens` `(…, C)`: counted elements must be those that the loss sums."""
    try:
        return mask.expand(tokens.shape[:-1])
    except RuntimeError:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}; expected {tuple(tokens.shape[:-1])}, a value per token"
        ) from None
