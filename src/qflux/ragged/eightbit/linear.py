"""A frozen linear layer that computes in 8 bits.

Shapes: T tokens, I channels in, O channels out.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qflux.ragged.eightbit.product import product, turned
from qflux.ragged.eightbit.rows import in_rows, in_rows_once


class EightBitLinear(nn.Linear):
    """A linear layer whose weight is rounded to 8 bits, and so is its input when it comes; the gradient likewise."""

    scale: nn.Parameter
    """`(O,)` what each row of the weight is to be multiplied by."""
    computes_in: torch.dtype
    """What the weight was before it was rounded."""
    is_last: bool
    """At the end of a block whose recomputation may leave it out (`recomputed.unread`)."""

    @classmethod
    def convert(cls, layer: nn.Linear, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Make a linear layer one of these where it is: whoever holds it, such as an adapter, holds it still.

        It is rounded on `device`, where that is quicker.
        """
        _become(layer, cls, dtype, device)
        assert isinstance(layer, cls)
        layer.is_last = False

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """How PEFT asks a layer whether it can `dequantize`: DoRA needs the norm of the weight."""
        return self.weight

    def dequantize(self) -> Tensor:
        """The weight in float32, as it multiplies."""
        return self.weight.float() * self.scale[:, None]

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor
        if torch.is_grad_enabled():
            tokens = input.reshape(-1, self.in_features)
            out = _Product.apply(tokens, self.weight, self.scale, self.bias, self.is_last)
        else:
            rows = in_rows_once(input, self.weight.dtype)  # as it was given: reshaped, it would be another tensor
            out = product(*rows, self.weight, self.scale, self.bias, input.dtype, False)
        return out.view(*input.shape[:-1], self.out_features)

    def of_two(self, first: Tensor, second: Tensor) -> Tensor:
        """`self(cat([first, second]))`: one product over the channels of two tensors, `(T, I1)` and `(T, I2)`."""
        out: Tensor = _ProductOfTwo.apply(first, second, self.weight, self.scale, self.bias, self.is_last)
        return out


class EightBitWeight(nn.Linear):
    """A linear layer that keeps its weight in 8 bits, and computes in its input's dtype.

    For the factors of modulation: they are few to compute, and an error in one is an error in every token of a sample.
    Integers, because of the two kinds they are nearer to a weight.
    """

    scale: nn.Parameter
    computes_in: torch.dtype

    @classmethod
    def convert(cls, layer: nn.Linear, device: torch.device | None = None) -> None:
        """See `EightBitLinear.convert`."""
        _become(layer, cls, torch.int8, device)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        return self.weight

    def dequantize(self) -> Tensor:
        return self.weight.float() * self.scale[:, None]

    def forward(self, input: Tensor) -> Tensor:
        out = F.linear(input, self.weight.to(input.dtype)) * self.scale.to(input.dtype)
        return out if self.bias is None else out + self.bias


def _become(layer: nn.Linear, cls: type[nn.Linear], dtype: torch.dtype, device: torch.device | None) -> None:
    home = layer.weight.device
    weight, scale = (tensor.to(home) for tensor in in_rows(layer.weight.detach().to(device or home), dtype))
    computes_in, layer.__class__ = layer.weight.dtype, cls
    assert is_eight_bit(layer)
    layer.computes_in = computes_in
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.scale = nn.Parameter(scale, requires_grad=False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, is_last: bool) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return product(*in_rows(tokens, weight.dtype), weight, scale, bias, tokens.dtype, is_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, scale = ctx.saved_tensors
        rows = in_rows(grad, weight.dtype, scale)
        return product(*rows, turned(weight), None, None, grad.dtype, False), None, None, None, None


class _ProductOfTwo(torch.autograd.Function):
    """Its two gradients are two products: a slice of one would have to be copied before attention takes it."""

    @staticmethod
    def forward(
        ctx: Any, first: Tensor, second: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, is_last: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.width = first.shape[1]
        rows = in_rows(torch.cat([first, second], dim=1), weight.dtype)
        return product(*rows, weight, scale, bias, first.dtype, is_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        weight, scale = ctx.saved_tensors
        rows, columns = in_rows(grad, weight.dtype, scale), turned(weight)
        first, second = (
            product(*rows, part, None, None, grad.dtype, False)
            for part in columns.split([ctx.width, len(columns) - ctx.width])
        )
        return first, second, None, None, None, None


def is_eight_bit(layer: nn.Module) -> TypeGuard[EightBitLinear | EightBitWeight]:
    return isinstance(layer, EightBitLinear | EightBitWeight)
