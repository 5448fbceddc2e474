"""The contract of every family: a sample in a mixed batch equals the same sample alone in stock diffusers.

Output and LoRA gradient, fp32, 1e-5, on random shapes.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from family_samples import KINDS, REFERENCES, Models, Sample, lora_gradient
from qflux.models import FAMILIES

TOLERANCE = 1e-5

# Per sample: rows and columns of the target, then of each control.
CASES = {
    "target sizes differ": [[(3, 4)], [(2, 7)], [(5, 5)]],
    "0, 1 and 3 controls": [[(3, 4)], [(2, 5), (2, 5)], [(4, 2), (4, 2), (3, 3), (1, 6)]],
    "control unlike target": [[(3, 4), (6, 2)], [(5, 2), (1, 9)], [(4, 4), (2, 3)]],
    "two equal, one not": [[(3, 4), (3, 4)], [(3, 4), (3, 4)], [(2, 2), (2, 2)]],
    "same length, other shape": [[(3, 4)], [(4, 3)], [(2, 6)]],
    "one token": [[(1, 1)], [(6, 6), (6, 6)]],
}
TEXT_LENGTHS = {"text alike": [7, 7, 7], "text differs": [5, 11, 1]}


@pytest.fixture(scope="module", params=KINDS)
def models(request) -> Models:
    return Models(request.param)


def test_every_family_is_under_contract():
    assert {reference.family for reference in REFERENCES.values()} == set(FAMILIES)


def assert_equal_to_alone(models: Models, samples: list[Sample], outputs) -> None:
    for sample, output in zip(samples, outputs, strict=True):
        expected = models.alone(sample)[: len(output)]
        assert (output - expected).abs().max() <= TOLERANCE
        expected_gradient = lora_gradient(models.stock, expected, sample.upstream)
        scale = expected_gradient.abs().max()
        gradient = lora_gradient(models.ours, output, sample.upstream)
        assert scale > 0.1, "a gradient too small to compare"
        assert (gradient - expected_gradient).abs().max() <= TOLERANCE * max(1.0, scale)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("text", TEXT_LENGTHS.values(), ids=TEXT_LENGTHS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_sample_in_a_mixed_batch_equals_the_sample_alone(models, case, text, padded, checkpointing):
    samples = models.samples(case, text=text)
    if checkpointing:
        models.ours.enable_gradient_checkpointing()
    try:
        assert_equal_to_alone(models, samples, models.packed(samples, padded))
    finally:
        models.ours.disable_gradient_checkpointing()


@pytest.mark.parametrize("mask_kind", ["bool", "float"])
@pytest.mark.parametrize("text", TEXT_LENGTHS.values(), ids=TEXT_LENGTHS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_padded_convention_equals_the_sample_alone_whatever_the_padding_holds(models, case, text, mask_kind):
    samples = models.samples(case, text=text)
    batch = models.batch(samples, fill=float("nan"))
    mask = batch.mask if mask_kind == "bool" else batch.mask.float()
    assert_equal_to_alone(models, samples, batch.outputs(models.padded(batch, attention_mask=mask)))


def test_the_order_of_a_batch_does_not_matter(models):
    samples = models.samples(CASES["0, 1 and 3 controls"] + CASES["control unlike target"])
    order = random.Random(0).sample(range(len(samples)), len(samples))
    straight = models.packed(samples)
    permuted = models.packed([samples[i] for i in order])
    for place, index in enumerate(order):
        assert (straight[index] - permuted[place]).abs().max() <= TOLERANCE


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=st.lists(
        st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    text=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_batches_equal_the_samples_alone(models, case, text, padded, seed):
    samples = models.samples(case, seed, text)
    assert_equal_to_alone(models, samples, models.packed(samples, padded))


def test_one_sample_runs_the_diffusers_forward(models):
    (sample,) = models.samples([[(3, 4), (2, 5)]])
    (output,) = models.packed([sample])
    assert torch.equal(output, models.alone(sample)[: len(output)])


def test_one_padded_sample_runs_the_diffusers_forward_on_what_is_valid(models):
    sample, longer = models.samples([[(3, 4)], [(4, 4)]], text=[5, 7])
    batch = models.batch([sample, longer], fill=float("nan")).first()
    (output,) = batch.outputs(models.padded(batch, attention_mask=batch.mask))
    assert torch.equal(output, models.alone(sample))


@pytest.mark.parametrize("convention", ["packed", "no mask", "all-true mask"])
def test_a_uniform_batch_runs_the_diffusers_forward(models, convention):
    samples = models.samples([[(3, 4), (2, 5)]] * 3)
    samples = [replace(sample, places=samples[0].places) for sample in samples]
    batch = models.batch(samples, fill=float("nan"))
    arguments = models.arguments(batch)
    for ids in {"img_ids", "image_cond_ids"} & set(arguments):
        arguments[ids] = arguments[ids][0]
    expected = torch.stack(batch.outputs(models.stock(**arguments, return_dict=False)[0]))
    if convention == "packed":
        output = torch.stack(models.packed(samples))
    else:
        full = torch.ones_like(batch.mask) if convention == "all-true mask" else None
        output = torch.stack(batch.outputs(models.padded(batch, attention_mask=full)))
    assert torch.equal(output, expected[:, : output.shape[1]])


def test_padding_rows_are_exactly_zero_and_get_exactly_zero_gradient(models):
    samples = models.samples(CASES["0, 1 and 3 controls"])
    batch = models.batch(samples, fill=3.0)
    batch.image.requires_grad_()
    batch.text.requires_grad_()
    batch.text_mask[0, 5] = False  # a hole in the text as well
    output = models.padded(batch, attention_mask=batch.mask)
    is_padding = batch.is_padding(output)
    padding = output[is_padding]
    assert torch.equal(padding, torch.zeros_like(padding))
    assert output[~is_padding].abs().min() > 0
    output.square().sum().backward()
    for gradient, valid in ((batch.image.grad, batch.image_mask), (batch.text.grad, batch.text_mask)):
        assert torch.equal(gradient[~valid], torch.zeros_like(gradient[~valid]))
        assert (gradient[valid].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_half_precision_is_no_worse_than_twice_the_error_of_stock(models, padded, dtype):
    samples = [sample for case in CASES.values() for sample in models.samples(case)]
    exact = [targets_alone(models, sample) for sample in samples]
    rounded = [sample.to(dtype) for sample in samples]
    half = Models(next(name for name, r in REFERENCES.items() if r is models.reference)).to(dtype)
    ours_error = max_error(half.packed(rounded, padded), exact)
    stock_error = max_error([targets_alone(half, sample) for sample in rounded], exact)
    assert ours_error <= 2 * stock_error


def targets_alone(models: Models, sample: Sample) -> torch.Tensor:
    return models.alone(sample)[: sample.shapes.target_tokens].detach()


def max_error(outputs, exact) -> float:
    return max(float((output.detach().float() - e).abs().max()) for output, e in zip(outputs, exact, strict=True))


def test_samples_do_not_influence_each_other(models):
    """The sharpest form of batch invariance: no gradient flows from one sample's output to another's input."""
    samples = models.samples(CASES["0, 1 and 3 controls"])
    for sample in samples:
        sample.image.requires_grad_()
    outputs = models.packed(samples)
    for index, output in enumerate(outputs):
        gradients = torch.autograd.grad(output.sum(), [s.image for s in samples], retain_graph=True)
        for other, gradient in enumerate(gradients):
            assert bool((gradient != 0).any()) == (other == index)


def test_the_lora_scale_reaches_the_ragged_forward(models):
    samples = models.samples(CASES["target sizes differ"])
    batch = models.batch(samples, fill=0.0)
    off = models.padded(batch, attention_mask=batch.mask, **{models.reference.attention_kwargs: {"scale": 0.0}})
    models.ours.disable_adapters()
    try:
        without = models.padded(batch, attention_mask=batch.mask)
    finally:
        models.ours.enable_adapters()
    assert (off - without).abs().max() <= TOLERANCE
    assert (models.padded(batch, attention_mask=batch.mask) - without).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask has shape"),
        ({"attention_mask": float("-inf")}, "additive"),
    ],
)
def test_impossible_inputs_are_named(models, change, message):
    batch = models.batch(models.samples([[(3, 4)], [(2, 2)]]), fill=0.0)
    if not isinstance(change["attention_mask"], torch.Tensor):
        change = {"attention_mask": torch.full(batch.mask.shape, change["attention_mask"])}
    with pytest.raises(ValueError, match=message):
        models.padded(batch, **{"attention_mask": batch.mask, **change})
