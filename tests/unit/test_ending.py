"""The last block makes only what is read, and what is read does not change: targets, and every gradient."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from family_samples import KINDS, Models
from qflux.ragged.ending import Ending

SHAPES = [[(3, 4), (2, 3)], [(4, 2)], [(2, 2), (3, 3), (1, 5)], [(1, 1), (5, 2)]]
"""Rows and columns of a target, then of its controls."""

PLACES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


@pytest.fixture(scope="module", params=KINDS)
def models(request) -> Models:
    models = Models(request.param)
    models.ours.requires_grad_(True)  # of all weights: those of what is not made have a gradient too
    return models


def everything_is_read():
    """As if nobody had said that only targets are."""
    return patch.object(Ending, "of", lambda layout, targets: layout)


def found(models: Models, samples) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    models.ours.zero_grad()
    outputs = models.packed(samples)
    sum(
        (out * s.upstream[: len(out), : out.shape[1]]).sum() for out, s in zip(outputs, samples, strict=True)
    ).backward()
    gradients = {name: parameter.grad for name, parameter in models.ours.named_parameters()}
    return [output.detach() for output in outputs], gradients


@settings(max_examples=12, deadline=None)
@given(case=st.lists(PLACES, min_size=2, max_size=4), text=st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_targets_and_the_gradients_of_all_weights_are_those_of_a_block_that_makes_everything(models, case, text):
    samples = models.samples(case, 0, text)
    outputs, gradients = found(models, samples)
    with everything_is_read():
        expected, wanted = found(models, samples)
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for name, gradient in wanted.items():
        # None instead of zeros would let an optimizer skip a weight, or ranks sum up different ones.
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None:
            error = (gradients[name] - gradient).abs().max()
            assert error <= 1e-5 * (1 + gradient.abs().max()), f"{name}: {error:.1e}"


def test_the_last_block_returns_targets_and_asks_for_them_alone(models):
    rows: list[int] = []
    last = models.family.blocks(models.ours)[-1]
    hooks = [
        layer.register_forward_hook(lambda layer, args, out: rows.append(len(out)))
        for name, layer in last.named_modules()
        if name.endswith(("to_out.0", "attn.to_out", "to_add_out", "proj_out"))
    ]
    try:
        samples = models.samples(SHAPES)
        models.packed(samples)
        assert sum(rows) == sum(sample.shapes.target_tokens for sample in samples)
        rows.clear()
        with everything_is_read():
            models.packed(samples)
        assert sum(rows) > sum(sample.shapes.target_tokens for sample in samples)
    finally:
        for hook in hooks:
            hook.remove()
