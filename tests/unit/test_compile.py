"""Compiled blocks: the same numbers, and no recompilation when only sizes change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from family_samples import Models, lora_parameters, random_sample
from qflux.ragged.compilation import compile_blocks

# Compiling takes a minute; that an ordinary call compiles at all is tested quickly in `test_stands_in_for_diffusers`.
pytestmark = pytest.mark.slow


FAMILIES = ["flux-kontext", "qwen-image-edit-plus, 2511", "flux2", "flux3", "qwen-image-2.1"]


@pytest.fixture(params=FAMILIES)
def compiled(request):
    torch._dynamo.reset()
    counters.clear()
    ours, eager = Models(request.param), Models(request.param)
    ours.ours.enable_gradient_checkpointing()
    # Whether code is compiled anew is seen before any backend. Graphs of gradients, which take longest, are made in
    # `test_unread` and `test_eight_bit`.
    compile_blocks(ours.family.blocks(ours.ours), backend="eager")
    yield ours, eager
    torch._dynamo.reset()


def random_batch(rng: random.Random, size: int, uniform: bool = False):
    """Samples that differ, or that are all alike."""
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    shapes = [[(rng.randint(2, 6), rng.randint(2, 6)) for _ in range(rng.randint(1, 3))] for _ in range(size)]
    texts = [rng.choice([7, 9]) for _ in range(size)]
    if uniform:
        shapes, texts = [shapes[0]] * size, [texts[0]] * size
    return [random_sample(*sample) for sample in zip(shapes, [generator] * size, texts, strict=True)]


def step(models, samples):
    outputs = models.packed(samples)
    fitted = [models.reference.fitted(sample) for sample in samples]
    loss = sum((output * s.upstream[: len(output)]).sum() for output, s in zip(outputs, fitted, strict=True))
    return torch.cat(outputs), torch.cat([g.flatten() for g in torch.autograd.grad(loss, lora_parameters(models.ours))])


def test_compiled_blocks_give_the_same_and_never_recompile_for_sizes(compiled):
    """Mixed batches, single samples and uniform batches are compiled once each, whatever their sizes.

    A single sample of a family with controls inside the text is compiled once for each number of them.
    The first batch has as many samples as the model has heads: equal by accident, not by rule.
    """
    ours, eager = compiled
    rng = random.Random(0)
    graphs = {}
    for kind, sizes in {"mixed": (4, 3, 5, 2), "single": (1, 1, 1), "uniform": (4, 3, 2)}.items():
        counts = []
        for size in sizes:
            samples = random_batch(rng, size, uniform=kind == "uniform")
            if kind == "single":  # one control in the middle of the text, where controls stand there at all
                shapes = [(rng.randint(2, 6), rng.randint(2, 6)) for _ in range(2)]
                alone = random_sample(shapes, torch.Generator().manual_seed(0), rng.choice([7, 9]))
                samples = [replace(alone, places=(3,))]
            output, gradient = step(ours, samples)
            expected, expected_gradient = step(eager, samples)
            assert (output - expected).abs().max() <= 1e-5
            assert (gradient - expected_gradient).abs().max() <= 1e-5 * expected_gradient.abs().max()
            counts.append(counters["stats"]["unique_graphs"])
        graphs[kind] = counts
    assert all(counts[0] > 0 and len(set(counts)) == 1 for counts in graphs.values()), graphs


@pytest.mark.parametrize("name", FAMILIES)
def test_what_enters_compiled_code_is_contiguous_so_that_it_is_read_in_whole_vectors(name):
    """Strides of other inputs are variables of the kernel: measured on one H200, it runs at a third of the speed."""
    torch._dynamo.reset()
    models, scattered = Models(name), set()

    def backend(graph, inputs):
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        tensors = [(n, x) for n, x in zip(names, inputs, strict=True) if isinstance(x, torch.Tensor)]
        scattered.update(n for n, x in tensors if not x.is_contiguous())
        return graph.forward

    compile_blocks(models.family.blocks(models.ours), backend=backend)
    samples = random_batch(random.Random(0), 3)
    with torch.no_grad():
        models.packed(samples)
    torch._dynamo.reset()
    assert not scattered


@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image", "flux2", "flux3", "qwen-image-2.1"])
def test_diffusers_own_compilation_of_repeated_blocks_finds_the_blocks(name):
    models = Models(name)
    models.ours.compile_repeated_blocks(backend="eager")
    assert all(block._compiled_call_impl is not None for block in models.family.blocks(models.ours))
