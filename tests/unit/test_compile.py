"""Compiled blocks: the same numbers, and no recompilation when only sizes change."""

from __future__ import annotations

import random

import pytest
import torch
from torch._dynamo.utils import counters

from flux_samples import lora_parameters, models_with_lora, random_sample, run_packed


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    ours, _ = models_with_lora()
    ours.enable_gradient_checkpointing()
    eager, _ = models_with_lora()
    for block in [*ours.transformer_blocks, *ours.single_transformer_blocks]:
        block.compile(dynamic=True, backend="aot_eager")
    yield ours, eager
    torch._dynamo.reset()


def random_batch(rng: random.Random, size: int):
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    return [
        random_sample(
            [(rng.randint(2, 6), rng.randint(2, 6)) for _ in range(rng.randint(1, 3))], generator, rng.choice([7, 9])
        )
        for _ in range(size)
    ]


def step(model, samples):
    outputs = run_packed(model, samples)
    loss = sum((output * s.upstream).sum() for output, s in zip(outputs, samples, strict=True))
    return torch.cat(outputs), torch.cat([g.flatten() for g in torch.autograd.grad(loss, lora_parameters(model))])


def test_compiled_blocks_give_the_same_and_never_recompile_for_sizes(compiled):
    ours, eager = compiled
    rng = random.Random(0)
    counts = []
    for size in (3, 4, 2, 5, 4):
        samples = random_batch(rng, size)
        output, gradient = step(ours, samples)
        expected, expected_gradient = step(eager, samples)
        assert (output - expected).abs().max() <= 1e-5
        assert (gradient - expected_gradient).abs().max() <= 1e-5 * expected_gradient.abs().max()
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[0] > 0
    assert len(set(counts)) == 1, f"graphs after each step: {counts}"
