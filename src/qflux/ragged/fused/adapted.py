"""A frozen linear layer and its LoRA as one product.

Taken apart, what a LoRA adds is a tensor of its own, as wide as the layer's output: it is made, scaled and added up,
and the same once more for the gradient. In FLUX.2 klein that is 1.1 GB for 15,000 tokens, three times over. Here it is
summed up where the layer's product lies already, and the LoRA's strength is applied to the few channels in its middle.

Nothing is kept for the backward pass but what was given. It has a gradient, but that has none.

Shapes: T tokens, I channels in (of one tensor, or of several side by side), O channels out, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qflux.ragged.recomputed import unread


def adapted_product(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    strength: float,
    is_last: bool = False,
) -> Tensor:
    """`x @ (weight + strength * up @ down).T + bias` for `x = cat(parts, dim=1)`; the parts are `(T, I_i)`.

    `down` is `(R, I)` and `up` `(O, R)`, in any floating dtype; the products are in the dtype of the parts. `is_last`
    says that a recomputation may leave it out (`recomputed.unread`).
    """
    if torch.compiler.is_compiling():  # one operator for the compiler, which would take long to look into the class
        return product_op(parts, weight, bias, down, up, strength, is_last)
    if not torch.is_grad_enabled():
        return _product(parts, weight, bias, down, up, strength, is_last)
    out: Tensor = _Adapted.apply(weight, bias, down, up, strength, is_last, *parts)
    return out


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        strength: float,
        is_last: bool,
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(weight, down, up, *parts)
        ctx.strength = strength
        return _product(parts, weight, bias, down, up, strength, is_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        of_down, of_up, *of_parts = _gradients(ctx, grad, (*needed[2:4], *needed[6:]))
        return None, None, of_down, of_up, None, None, *of_parts


def _gradients(ctx: Any, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Of `down`, `up` and the parts, as far as they are wanted."""
    weight, down, up, *parts = ctx.saved_tensors
    found = gradient_op(grad, parts, weight, down, up, ctx.strength, any(wanted[:2]), any(wanted[2:]))
    return [each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)]


def _product(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    strength: float,
    is_last: bool,
) -> Tensor:
    if is_last and unread.is_left_out():
        return unread.nothing(parts[0], weight.shape[0])
    (first, *others), (left, *rest) = parts, (weight[:, place] for place in _places(parts))
    out = F.linear(first, left, bias)
    for part, columns in zip(others, rest, strict=True):
        out.addmm_(part, columns.t())
    return out.addmm_(_middle(parts, down), up.to(out.dtype).t(), alpha=strength)


# Operators of their own, so that compiled code asks when it runs whether the product is wanted, and does not take apart
# what is summed up in place.
product_op = torch.library.custom_op("qflux::adapted_product", _product, mutates_args=())


@product_op.register_fake
def _(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    strength: float,
    is_last: bool,
) -> Tensor:
    return unread.nothing(parts[0], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, weight, _, down, up, ctx.strength, _ = inputs
    ctx.save_for_backward(weight, down, up, *parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    of_parts, _, _, trains_down, trains_up, *_ = ctx.needs_input_grad
    of_down, of_up, *found = _gradients(ctx, grad, (trains_down, trains_up, *of_parts))
    return found, None, None, of_down, of_up, None, None


product_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("qflux::adapted_gradients", mutates_args=())
def gradient_op(
    grad: Tensor,
    parts: Sequence[Tensor],
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    strength: float,
    trains: bool,
    goes_on: bool,
) -> list[Tensor]:
    """The gradients of `down` and `up`, if the LoRA trains, and of the parts, if there is more behind them."""
    of_middle = (grad @ up.to(grad.dtype)).mul_(strength)
    found = [torch.empty_like(down), torch.empty_like(up)]
    if trains:
        for part, place in zip(parts, _places(parts), strict=True):
            found[0][:, place] = of_middle.t() @ part
        found[1].copy_(grad.t() @ _middle(parts, down).mul_(strength))
    if not goes_on:
        return [*found, *(part.new_empty(0) for part in parts)]
    whole = down.to(grad.dtype)
    of_parts = [grad @ weight[:, place] for place in _places(parts)]
    for of_part, place in zip(of_parts, _places(parts), strict=True):
        of_part.addmm_(of_middle, whole[:, place])
    return [*found, *of_parts]


@gradient_op.register_fake
def _(
    grad: Tensor,
    parts: Sequence[Tensor],
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    strength: float,
    trains: bool,
    goes_on: bool,
) -> list[Tensor]:
    of_parts = [part.new_empty(part.shape if goes_on else (0,)) for part in parts]
    return [torch.empty_like(down), torch.empty_like(up), *of_parts]


def _middle(parts: Sequence[Tensor], down: Tensor) -> Tensor:
    """`x @ down.T` `(T, R)`: what lies between the two factors of a LoRA."""
    down = down.to(parts[0].dtype)
    first, *others = (part @ down[:, place].t() for part, place in zip(parts, _places(parts), strict=True))
    for other in others:
        first.add_(other)
    return first


def _places(parts: Sequence[Tensor]) -> list[slice]:
    """The channels of each part among those of all."""
    ends = accumulate((part.shape[1] for part in parts), initial=0)
    return [slice(start, end) for start, end in pairwise(ends)]
