"""The last product of a block is not computed again, where nobody reads it; gradients are the same to the bit."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from family_samples import REFERENCES, Models, lora_parameters
from qflux.adapters.lora import add, containers
from qflux.memory.recomputation import recompute
from qflux.ragged.compilation import compile_blocks
from qflux.ragged.recomputed import unread

SHAPES = {"mixed": [[(2, 3), (3, 3)], [(4, 2), (2, 2)]], "alone": [[(3, 4), (2, 3)]]}


@pytest.fixture
def left_out(monkeypatch) -> list[int]:
    """The widths of products that were left out; what stands in their place spoils whatever reads it."""
    widths: list[int] = []

    def spoiled(tokens: Tensor, width: int) -> Tensor:
        if not isinstance(tokens, torch._subclasses.FakeTensor):
            widths.append(width)
        return tokens.new_full((*tokens.shape[:-1], width), torch.nan)

    monkeypatch.setattr(unread, "nothing", spoiled)
    return widths


def gradients(models: Models, shapes: list[list[tuple[int, int]]]) -> Tensor:
    samples = [models.reference.fitted(sample) for sample in models.samples(shapes)]
    outputs = models.packed(samples)
    loss = sum((output * sample.upstream[: len(output)]).sum() for output, sample in zip(outputs, samples, strict=True))
    found = torch.autograd.grad(loss, lora_parameters(models.ours), allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def with_lora(name: str, config: LoraConfig) -> Models:
    models = Models(name)
    models.ours.delete_adapters(["default"])
    models.ours.requires_grad_(False)
    targets = list(config.target_modules)
    config.target_modules = targets
    add(models.ours, config, exclude=containers(models.ours, targets))
    torch.manual_seed(3)
    for parameter in lora_parameters(models.ours):
        torch.nn.init.normal_(parameter, std=0.2)
    return models


@pytest.mark.parametrize("batch", SHAPES)
@pytest.mark.parametrize("keeps_attention", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_the_last_product_is_left_out_and_gradients_are_the_same(name, keeps_attention, batch, left_out):
    models = Models(name)
    expected = gradients(models, SHAPES[batch])
    blocks = models.family.blocks(models.ours)
    recompute(models.ours, {id(block) for block in blocks}, keeps_attention)
    assert torch.equal(gradients(models, SHAPES[batch]), expected)
    assert len(left_out) == sum(len(block.unread.layers) for block in blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image-edit-plus, 2511", "flux2", "flux3", "qwen-image-2.1"])
def test_compiled_code_leaves_it_out_too(name, left_out):
    torch._dynamo.reset()
    models = Models(name)
    expected = gradients(models, SHAPES["mixed"])
    blocks = models.family.blocks(models.ours)
    recompute(models.ours, {id(block) for block in blocks})
    compile_blocks(blocks, backend="aot_eager")
    torch.testing.assert_close(gradients(models, SHAPES["mixed"]), expected, rtol=1e-5, atol=1e-5)
    assert len(left_out) == sum(len(block.unread.layers) for block in blocks)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (
            "flux-kontext",
            LoraConfig(r=2, target_modules=["to_q", "norm.linear", "norm1.linear", "norm1_context.linear"]),
        ),
        ("qwen-image-edit-plus, 2511", LoraConfig(r=2, target_modules=["to_q", "img_mod.1", "txt_mod.1"])),
        ("flux2", LoraConfig(r=2, target_modules=["to_q", "to_qkv_mlp_proj", "single_stream_modulation.linear"])),
        ("flux-kontext", LoraConfig(r=2, target_modules=["to_q", "time_text_embed.timestep_embedder.linear_1"])),
        ("flux-kontext", LoraConfig(r=2, target_modules=["proj_out", "ff.net.2", "ff_context.net.2"], use_dora=True)),
    ],
    ids=["gates inside", "gates inside, Qwen", "gates outside", "what gates are made of", "DoRA"],
)
def test_what_reads_it_gets_it(name, config, left_out):
    """A gate that trains needs what it multiplies, and so does DoRA's magnitude."""
    models = with_lora(name, config)
    expected = gradients(models, SHAPES["mixed"])
    assert expected.abs().max() > 0
    recompute(models.ours, {id(block) for block in models.family.blocks(models.ours)})
    assert torch.equal(gradients(models, SHAPES["mixed"]), expected)
    assert not left_out
