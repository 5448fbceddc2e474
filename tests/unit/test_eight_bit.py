"""Products in 8 bits, forward and backward, of frozen layers: against arithmetic in float64, and across families."""

from __future__ import annotations

import logging
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from family_samples import REFERENCES, Models, lora_parameters, random_sample
from qflux.config import load_config
from qflux.memory.recomputation import recompute
from qflux.memory.streaming import StreamedBlocks
from qflux.models import precision
from qflux.models.precision import EIGHT_BITS, compute_in_eight_bits, settled
from qflux.ragged.compilation import compile_blocks
from qflux.ragged.eightbit import linear as linear_module
from qflux.ragged.eightbit import mlp, rows
from qflux.ragged.eightbit.linear import EightBitLinear, EightBitWeight, is_eight_bit
from qflux.ragged.eightbit.rows import LARGEST, in_rows, in_rows_once
from qflux.ragged.recomputed.unread import leaving_out

KINDS = list(LARGEST)
NEAR = {torch.float8_e4m3fn: 2**-4, torch.int8: 0.5 / 127}
"""How far a rounded number may be: of itself, or of the largest in its row."""
SHAPES = [[(2, 3), (3, 3)], [(4, 2), (2, 2)]]


def cosine(one: Tensor, other: Tensor) -> float:
    return F.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0).item()


def linear(width: int, out: int, dtype: torch.dtype, bias: bool = True) -> EightBitLinear:
    layer = nn.Linear(width, out, bias=bias).requires_grad_(False)
    EightBitLinear.convert(layer, dtype)
    assert isinstance(layer, EightBitLinear)
    return layer


def exact(rows: Tensor, scale: Tensor) -> Tensor:
    return rows.double() * scale.double()[:, None]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_as_near_as_8_bits_allow(dtype, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    x = torch.randn(draw.randint(1, 40), draw.randint(1, 70)) * 10.0 ** torch.randint(-12, 9, (1,))
    factor = torch.rand(x.shape[1]) + 0.1 if seed % 2 else None
    values = x.double() if factor is None else x.double() * factor
    rows, scale = in_rows(x, dtype, factor)
    assert rows.dtype == dtype
    largest = values.abs().amax(dim=1, keepdim=True)
    allowed = NEAR[dtype] * (values.abs() + largest / LARGEST[dtype] if dtype != torch.int8 else largest)
    assert ((exact(rows, scale) - values).abs() <= 1.001 * allowed).all()
    assert rows.float().abs().amax(dim=1).eq(LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", KINDS)
def test_what_is_no_number_is_seen_in_its_own_row_only(dtype):
    layer, x = linear(8, 6, dtype), torch.randn(4, 8)
    expected = layer(x)
    for odd in (torch.nan, torch.inf, -torch.inf):
        spoiled = x.clone()
        spoiled[1, 3] = odd
        out = layer(spoiled)
        assert not out[1].isfinite().any()
        assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.parametrize("dtype", KINDS)
def test_zeros_and_nothing_at_all(dtype):
    layer = linear(8, 6, dtype)
    assert torch.equal(layer(torch.zeros(2, 8)), layer.bias.expand(2, 6))
    nothing = torch.zeros(0, 8, requires_grad=True)
    out = layer(nothing)
    assert out.shape == (0, 6)
    assert torch.autograd.grad(out.sum(), nothing)[0].shape == (0, 8)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_product_is_that_of_rounded_numbers_and_so_is_its_gradient(dtype, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count, width, out = (draw.randint(1, 50) for _ in range(3))
    layer = linear(width, out, dtype, bias=seed > 0)
    x, upstream = torch.randn(count, width, requires_grad=True), torch.randn(count, out)
    weight = layer.weight.double()
    expected = exact(*in_rows(x.detach(), dtype)) @ (weight * layer.scale.double()[:, None]).t()
    if layer.bias is not None:
        expected = expected + layer.bias
    found = layer(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found, x, upstream)
    of_rows = exact(*in_rows(upstream, dtype, layer.scale))
    torch.testing.assert_close(gradient.double(), of_rows @ weight, rtol=1e-5, atol=1e-5)
    cut = draw.randint(0, width)
    assert torch.equal(layer.of_two(x[:, :cut], x[:, cut:]), found)
    assert torch.equal(layer(x.reshape(1, count, width))[0], found)
    torch.testing.assert_close(layer.dequantize().double(), weight * layer.scale.double()[:, None])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("beside", [0, 7])
@pytest.mark.parametrize("seed", range(3))
def test_an_mlp_is_its_two_layers_around_a_gelu(dtype, beside, seed):
    torch.manual_seed(seed)
    up, down = linear(12, 20, dtype), linear(20 + beside, 9, dtype)
    x = torch.randn(30, 12, requires_grad=True)
    other = torch.randn(30, beside, requires_grad=True) if beside else None
    hidden = F.gelu(up(x), approximate="tanh")
    expected = down(hidden if other is None else torch.cat([other, hidden], dim=1))
    found = mlp.gelu_mlp(up, down, x, other)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream, inputs = torch.randn_like(found), [x] if other is None else [x, other]
    theirs, ours = (torch.autograd.grad(out, inputs, upstream) for out in (expected, found))
    for one, another in zip(ours, theirs, strict=True):  # a number may fall to the other side of a rounding
        assert cosine(one, another) > 0.99999
    with torch.no_grad():
        assert torch.equal(mlp.gelu_mlp(up, down, x, other), found)


def test_tokens_are_rounded_once_for_all_that_reads_them_and_again_when_they_change():
    x = torch.randn(3, 4)
    first = in_rows_once(x, torch.int8)
    assert in_rows_once(x, torch.int8)[0] is first[0]
    x.mul_(-1)
    assert torch.equal(in_rows_once(x, torch.int8)[0], -first[0])
    assert in_rows_once(x, torch.float8_e4m3fn)[0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image-edit", "flux2", "flux3", "qwen-image-2.1"])
def test_a_block_rounds_its_tokens_once_for_all_layers_that_read_them(name, monkeypatch):
    """Sampling runs as it is written: rounding again for queries, keys and values costs a twentieth of a step."""
    models = Models(name)
    blocks = models.family.blocks(models.ours)
    compute_in_eight_bits(blocks, "fp8")
    rounded: list[Tensor] = []

    def remembering(x, dtype, factor=None):
        rounded.append(x)  # held, so that no other tensor gets its place in memory
        return in_rows(x, dtype, factor)

    for module in (rows, mlp, linear_module):
        monkeypatch.setattr(module, "in_rows", remembering)
    batches = [SHAPES, SHAPES[:1], SHAPES[:1] * 2]  # different ones, one alone, two that are alike
    if name == "flux3":  # whose own forward, which the last two run, comes back to the tokens behind attention
        batches = [SHAPES]
    for batch in batches:
        rounded.clear()
        with torch.no_grad():
            models.packed([random_sample(shapes, torch.Generator().manual_seed(0), 7) for shapes in batch])
        assert rounded
        seen = [(x.data_ptr(), x.shape, x._version) for x in rounded if len(x)]
        assert len(set(seen)) == len(seen)


def test_a_product_that_nobody_reads_is_left_out():
    layer, x = linear(8, 6, torch.int8), torch.full((2, 8), torch.nan)
    layer.is_last = True
    assert layer(x).isnan().all()
    with leaving_out():
        rows, _ = mlp.gelu_rows(torch.zeros(2, 8), None, torch.int8, True)
        assert rows.shape == (2, 8)
        assert layer(x).shape == (2, 6)


def gradients(models: Models) -> Tensor:
    samples = [models.reference.fitted(sample) for sample in models.samples(SHAPES)]
    outputs = models.packed(samples)
    loss = sum((output * sample.upstream[: len(output)]).sum() for output, sample in zip(outputs, samples, strict=True))
    found = torch.autograd.grad(loss, lora_parameters(models.ours), allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def outputs(models: Models, alone: bool = False) -> list[Tensor]:
    samples = [models.reference.fitted(sample) for sample in models.samples(SHAPES)]
    with torch.no_grad():
        return [models.packed([sample])[0] for sample in samples] if alone else models.packed(samples)


def named(block: nn.Module) -> list[str]:
    """The layers of a block that existed before it got an adapter."""
    names = [name for name, layer in block.named_modules() if isinstance(layer, nn.Linear)]
    return [name for name in names if ".lora_" not in name]


@pytest.mark.parametrize("kind", EIGHT_BITS)
@pytest.mark.parametrize("name", REFERENCES)
def test_every_family_computes_in_8_bits(name, kind):
    models = Models(name)
    expected, gradient, dtype = outputs(models), gradients(models), models.ours.dtype
    blocks = models.family.blocks(models.ours)
    inside = {id(layer) for block in blocks for layer in block.modules()}
    outside = [layer for layer in models.ours.modules() if isinstance(layer, nn.Linear) and id(layer) not in inside]
    compute_in_eight_bits(blocks, kind)
    changed = {id(layer) for layer in models.ours.modules() if is_eight_bit(layer)}
    gates = [block.get_submodule(gate) for block in blocks for gate in block.unread.gates]
    assert all(type(layer) is EightBitWeight for gate in gates for layer in gate.modules() if id(layer) in changed)
    assert all(id(layer) in changed for gate in gates for layer in gate.modules() if isinstance(layer, nn.Linear))
    assert {id(block.get_submodule(name)) for block in blocks for name in named(block)} <= changed
    assert not any(id(layer) in changed for layer in outside)
    assert models.ours.dtype == dtype
    together = outputs(models)
    for one, other in zip(together, expected, strict=True):
        assert cosine(one, other) > (0.98 if kind == "fp8" else 0.995)
    assert cosine(gradients(models), gradient) > (0.97 if kind == "fp8" else 0.99)
    for one, other in zip(together, outputs(models, alone=True), strict=True):  # whoever else is in the batch
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["flux-kontext", "flux2", "qwen-image-edit-plus, 2511"])
def test_recomputation_and_streaming_change_no_bit(name):
    models = Models(name)
    blocks = models.family.blocks(models.ours)
    compute_in_eight_bits(blocks, "fp8")
    expected = gradients(models)
    recompute(models.ours, {id(block) for block in blocks})
    assert torch.equal(gradients(models), expected)
    last = [block.get_submodule(layer) for block in blocks for layer in block.unread.layers]
    assert all(getattr(getattr(layer, "base_layer", layer), "is_last", False) for layer in last)
    StreamedBlocks(blocks, torch.device("cpu"))
    assert torch.equal(gradients(models), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("flux-kontext", "aot_eager"), ("flux2", "eager")])
def test_compiled_code_does_not_compile_anew_for_other_sizes(name, backend):
    torch._dynamo.reset()
    models = Models(name)
    blocks = models.family.blocks(models.ours)
    compute_in_eight_bits(blocks, "fp8")
    expected = gradients(models)
    compile_blocks(blocks, backend=backend)
    torch.testing.assert_close(gradients(models), expected, rtol=1e-3, atol=1e-4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shapes in ([[(3, 3), (2, 2)], [(2, 5), (4, 3)]], [[(6, 2), (3, 2)], [(4, 4), (5, 3)]]):
            samples = [models.reference.fitted(sample) for sample in models.samples(shapes)]
            sum(output.sum() for output in models.packed(samples)).backward()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image-edit", "flux2", "flux3", "qwen-image-2.1"])
def test_compiled_code_without_a_gradient_gives_the_same(name):
    """As validation runs it between steps."""
    torch._dynamo.reset()
    models = Models(name)
    blocks = models.family.blocks(models.ours)
    compute_in_eight_bits(blocks, "fp8")
    samples = [models.reference.fitted(sample) for sample in models.samples(SHAPES)]
    with torch.no_grad():
        expected = models.packed(samples)
        compile_blocks(blocks, backend="eager")
        for output, wanted in zip(models.packed(samples), expected, strict=True):
            assert torch.equal(output, wanted)
    torch._dynamo.reset()


def test_a_gpu_that_can_not_is_named_in_one_line(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    monkeypatch.setattr(precision.fused, "HAS_TRITON", True)

    def chosen(asked: str | None, device: str = "cuda", **settings: object) -> str | None:
        config = load_config({"data": {"path": "x"}, "model": {"pretrained": "x", "precision": asked}, **settings})
        return settled(config, torch.device(device)).model.precision

    with caplog.at_level(logging.WARNING):
        assert [chosen("fp8") for _ in range(2)] == [None, None]
        assert chosen("int8") == "int8"
    assert len(caplog.records) == 1
    assert "RTX 3090 can't do it (it has compute capability 8.6)" in caplog.text
    assert "model.dtype is used instead" in caplog.text
    assert chosen("auto") == "int8"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert [chosen("auto"), chosen("fp8"), chosen(None)] == ["fp8", "fp8", None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert chosen("auto") is None
    assert [chosen("fp8", "cpu"), chosen("auto", "cpu"), chosen("auto", "cpu", memory="24GB")] == ["fp8", None, "fp8"]
