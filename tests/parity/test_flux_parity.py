"""A sample in a mixed batch equals the same sample alone in stock diffusers: output and LoRA gradient, fp32, 1e-5."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flux_samples import (
    FluxSample,
    PaddedBatch,
    lora_gradient,
    models_with_lora,
    random_sample,
    run_alone,
    run_packed,
)

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


@pytest.fixture(scope="module")
def models():
    return models_with_lora()


def samples_of(case: list[list[tuple[int, int]]], seed: int = 0) -> list[FluxSample]:
    generator = torch.Generator().manual_seed(seed)
    return [random_sample(shapes, generator) for shapes in case]


def assert_equal_to_alone(models, samples: list[FluxSample], outputs) -> None:
    ours, stock = models
    for sample, output in zip(samples, outputs, strict=True):
        expected = run_alone(stock, sample)
        assert (output - expected).abs().max() <= TOLERANCE
        expected_gradient = lora_gradient(stock, expected, sample.upstream)
        scale = expected_gradient.abs().max()
        gradient = lora_gradient(ours, output, sample.upstream)
        assert scale > 0.1, "a gradient too small to compare"
        assert (gradient - expected_gradient).abs().max() <= TOLERANCE * max(1.0, scale)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_sample_in_a_mixed_batch_equals_the_sample_alone(models, case, padded, checkpointing):
    samples = samples_of(case)
    ours, _ = models
    if checkpointing:
        ours.enable_gradient_checkpointing()
    try:
        assert_equal_to_alone(models, samples, run_packed(ours, samples, padded))
    finally:
        ours.disable_gradient_checkpointing()


@pytest.mark.parametrize("mask_kind", ["bool", "float"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_padded_calling_convention_equals_the_sample_alone_whatever_the_padding_holds(models, case, mask_kind):
    ours, _ = models
    samples = samples_of(case)
    batch = PaddedBatch.of(samples, fill=float("nan"))
    mask = batch.mask if mask_kind == "bool" else batch.mask.float()
    output = batch.run(ours, samples, mask)
    assert_equal_to_alone(models, samples, [row[: len(s.image)] for row, s in zip(output, samples, strict=True)])


def test_texts_of_different_length_equal_the_sample_alone(models):
    ours, _ = models
    generator = torch.Generator().manual_seed(5)
    samples = [random_sample(shapes, generator, length) for shapes, length in (([(3, 4)], 5), ([(2, 2)], 11))]
    assert_equal_to_alone(models, samples, run_packed(ours, samples))
    batch = PaddedBatch.of(samples, fill=float("nan"))
    output = batch.run(ours, samples, batch.mask)
    assert_equal_to_alone(models, samples, [row[: len(s.image)] for row, s in zip(output, samples, strict=True)])


def test_shared_image_ids_with_a_mask_equal_the_sample_alone(models):
    """`img_ids` `(S, 3)`: samples are prefixes of one grid, cut off by the mask."""
    ours, _ = models
    samples = samples_of([[(6, 4)], [(3, 4)]])
    batch = PaddedBatch.of(samples, fill=float("nan"))
    batch.img_ids = batch.img_ids[0]
    output = batch.run(ours, samples, batch.mask)
    assert_equal_to_alone(models, samples, [row[: len(s.image)] for row, s in zip(output, samples, strict=True)])


def test_per_sample_image_ids_need_no_mask(models):
    """Same length, other shapes: stock diffusers would give every sample the first one's positions."""
    ours, _ = models
    samples = samples_of([[(3, 4)], [(4, 3)], [(2, 6)]])
    output = PaddedBatch.of(samples, fill=0.0).run(ours, samples, None)
    assert_equal_to_alone(models, samples, output)


def test_the_order_of_a_batch_does_not_matter(models):
    ours, _ = models
    samples = samples_of(CASES["0, 1 and 3 controls"] + CASES["control unlike target"])
    order = random.Random(0).sample(range(len(samples)), len(samples))
    straight = run_packed(ours, samples)
    permuted = run_packed(ours, [samples[i] for i in order])
    for place, index in enumerate(order):
        assert (straight[index] - permuted[place]).abs().max() <= TOLERANCE


@settings(max_examples=25, deadline=None)
@given(
    case=st.lists(
        st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    padded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_batches_equal_the_samples_alone(models, case, padded, seed):
    samples = samples_of(case, seed)
    assert_equal_to_alone(models, samples, run_packed(models[0], samples, padded))


def test_one_sample_runs_the_diffusers_forward(models):
    ours, stock = models
    (sample,) = samples_of([[(3, 4), (2, 5)]])
    assert torch.equal(run_packed(ours, [sample])[0], run_alone(stock, sample))


def test_one_padded_sample_runs_the_diffusers_forward_on_what_is_valid(models):
    ours, stock = models
    sample, longer = samples_of([[(3, 4)], [(4, 4)]])
    batch = PaddedBatch.of([sample, longer], fill=float("nan"))
    first = PaddedBatch(batch.image[:1], batch.text[:1], batch.img_ids[:1], batch.mask[:1])
    output = first.run(ours, [sample], first.mask)
    assert torch.equal(output[0, :12], run_alone(stock, sample))


@pytest.mark.parametrize("convention", ["packed", "per-sample ids", "shared ids", "all-true mask"])
def test_a_uniform_batch_runs_the_diffusers_forward(models, convention):
    ours, stock = models
    samples = samples_of([[(3, 4), (2, 5)]] * 3)
    batch = PaddedBatch.of(samples, fill=float("nan"))
    expected = stock(
        hidden_states=batch.image,
        encoder_hidden_states=batch.text,
        pooled_projections=torch.stack([s.pooled for s in samples]),
        timestep=torch.stack([s.sigma for s in samples]),
        img_ids=batch.img_ids[0],
        txt_ids=torch.zeros(batch.text.shape[1], 3),
        guidance=torch.full((3,), 3.5),
        return_dict=False,
    )[0]
    if convention == "packed":
        output = torch.stack(run_packed(ours, samples))
    else:
        if convention == "shared ids":
            batch.img_ids = batch.img_ids[0]
        output = batch.run(ours, samples, batch.mask if convention == "all-true mask" else None)
    assert torch.equal(output, expected)


def test_padding_rows_are_exactly_zero_and_get_exactly_zero_gradient(models):
    ours, _ = models
    samples = samples_of(CASES["0, 1 and 3 controls"])
    batch = PaddedBatch.of(samples, fill=3.0)
    batch.image.requires_grad_()
    batch.text.requires_grad_()
    batch.mask[0, 5] = False  # a hole in the text as well
    output = batch.run(ours, samples, batch.mask)
    valid_text, valid_image = batch.mask[:, :7], batch.mask[:, 7:]
    assert torch.equal(output[~valid_image], torch.zeros_like(output[~valid_image]))
    assert output[valid_image].abs().min() > 0
    output.square().sum().backward()
    for gradient, valid in ((batch.image.grad, valid_image), (batch.text.grad, valid_text)):
        assert torch.equal(gradient[~valid], torch.zeros_like(gradient[~valid]))
        assert (gradient[valid].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_half_precision_is_no_worse_than_twice_the_error_of_stock(padded, dtype):
    ours, stock = models_with_lora()
    samples = [sample for case in CASES.values() for sample in samples_of(case)]
    exact = [run_alone(stock, sample).detach() for sample in samples]
    ours, stock = ours.to(dtype), stock.to(dtype)
    rounded = [sample.to(dtype) for sample in samples]
    ours_error = max_error(run_packed(ours, rounded, padded), exact)
    stock_error = max_error([run_alone(stock, sample) for sample in rounded], exact)
    assert ours_error <= 2 * stock_error


def max_error(outputs, exact) -> float:
    return max(float((output.detach().float() - e).abs().max()) for output, e in zip(outputs, exact, strict=True))


def test_samples_do_not_influence_each_other(models):
    """The sharpest form of batch invariance: no gradient flows from one sample's output to another's input."""
    ours, _ = models
    samples = samples_of(CASES["0, 1 and 3 controls"])
    for sample in samples:
        sample.image.requires_grad_()
    outputs = run_packed(ours, samples)
    for index, output in enumerate(outputs):
        gradients = torch.autograd.grad(output.sum(), [s.image for s in samples], retain_graph=True)
        for other, gradient in enumerate(gradients):
            assert bool((gradient != 0).any()) == (other == index)


def test_the_lora_scale_of_joint_attention_kwargs_reaches_the_ragged_forward(models):
    ours, _ = models
    samples = samples_of(CASES["target sizes differ"])
    batch = PaddedBatch.of(samples, fill=0.0)
    arguments = {
        "hidden_states": batch.image,
        "encoder_hidden_states": batch.text,
        "pooled_projections": torch.stack([s.pooled for s in samples]),
        "timestep": torch.stack([s.sigma for s in samples]),
        "img_ids": batch.img_ids,
        "txt_ids": torch.zeros(7, 3),
        "guidance": torch.full((3,), 3.5),
        "attention_mask": batch.mask,
    }
    off = ours(**arguments, joint_attention_kwargs={"scale": 0.0}).sample
    ours.disable_adapters()
    try:
        without = ours(**arguments).sample
    finally:
        ours.enable_adapters()
    assert (off - without).abs().max() <= TOLERANCE
    assert (ours(**arguments).sample - without).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask has shape"),
        ({"attention_mask": torch.full((2, 19), float("-inf"))}, "additive"),
        ({"img_ids": torch.zeros(3, 3)}, "img_ids has shape"),
        ({"txt_ids": torch.zeros(9, 3)}, "txt_ids has shape"),
        ({"controlnet_block_samples": [torch.zeros(1)]}, "ControlNet"),
        ({"joint_attention_kwargs": {"ip_adapter_image_embeds": []}}, "ip_adapter_image_embeds"),
    ],
)
def test_impossible_inputs_are_named(models, change, message):
    ours, _ = models
    samples = samples_of([[(3, 4)], [(2, 2)]])
    batch = PaddedBatch.of(samples, fill=0.0)
    arguments = {
        "hidden_states": batch.image,
        "encoder_hidden_states": batch.text,
        "pooled_projections": torch.stack([s.pooled for s in samples]),
        "timestep": torch.stack([s.sigma for s in samples]),
        "img_ids": batch.img_ids,
        "txt_ids": torch.zeros(7, 3),
        "guidance": torch.full((2,), 3.5),
        "attention_mask": batch.mask,
    }
    with pytest.raises(ValueError, match=message):
        ours(**{**arguments, **change})
