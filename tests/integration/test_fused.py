"""The fused kernels on a GPU compute what the torch operations they replace compute."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from qflux.adapters.lora import inject
from qflux.config import LoraSettings
from qflux.data.encoded import TextEmbedding
from qflux.models import get_family
from qflux.models.family import ModelInputs
from qflux.models.mlp import gelu_beside, linear_of_two
from qflux.ragged import fused
from qflux.ragged.heads import join_heads, join_turned_heads, turned_heads
from qflux.ragged.layout import PackedLayout
from qflux.ragged.modulation import add_gated, norm_modulate
from qflux.ragged.shapes import Shapes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYOUT = ([3, 40, 17], [70, 33, 129])
ROUNDINGS = 4


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def randn(request):
    """Numbers of half precision. With gradients enabled, `fused.ready` says no, and torch computes."""
    generator = torch.Generator("cuda").manual_seed(0)
    return lambda *shape: torch.randn(*shape, device="cuda", generator=generator).to(request.param)


def assert_same(function):
    """`function` by kernels and by torch; float64 would be closer to neither, so a few roundings may lie between."""
    with torch.enable_grad():
        expected = function().detach()
    with torch.no_grad():
        actual = function()
    assert actual.dtype == expected.dtype
    size = expected.float().abs().clamp_min(expected.float().std())
    apart = (actual.float() - expected.float()).abs() / size
    assert float(apart.max()) <= ROUNDINGS * torch.finfo(expected.dtype).eps


@pytest.mark.parametrize("width", [3072, 128, 1000])
def test_modulation_and_gates(randn, width):
    row = torch.randint(0, 3, (501,), device="cuda")
    conditioning, tokens, update = randn(3, 6 * width), randn(501, width) * 3 + 1, randn(501, width)
    shift, scale, gate = conditioning.chunk(6, dim=-1)[:3]
    norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
    assert fused.ready(tokens) is False
    with torch.no_grad():
        assert fused.ready(tokens)
    assert_same(lambda: norm_modulate(norm, tokens, scale, shift, row))
    assert_same(lambda: add_gated(tokens, gate, update, row))


@pytest.mark.parametrize("heads", [24, 3, 1])
@pytest.mark.parametrize("norm", [nn.RMSNorm, RMSNorm])
@pytest.mark.parametrize("width", [128, 32])
def test_heads(randn, heads, norm, width):
    layout = PackedLayout.build(*LAYOUT, device="cuda")
    text, image = randn(sum(LAYOUT[0]), heads, width), randn(sum(LAYOUT[1]), heads, width)
    norms = tuple(norm(width, eps=1e-6).to("cuda", text.dtype) for _ in range(2))
    for each in norms:
        each.weight.data.copy_(randn(width))
    angle = torch.randn(len(text) + len(image), width // 2, device="cuda")
    rotary = torch.stack([angle.cos(), angle.sin()], dim=-1)[:, None]
    for each in norms:
        assert_same(lambda each=each: turned_heads(layout.join(text, image), each, rotary))
    assert_same(lambda: join_turned_heads(layout, text, image, norms, rotary))
    assert_same(lambda: join_heads(layout, text, image))


@pytest.mark.parametrize("heads", [24, 3, 1])
@pytest.mark.parametrize("norm", [nn.RMSNorm, RMSNorm])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_heads_are_nearer_than_those_of_torch(randn, heads, norm, compiled, monkeypatch):
    layout = PackedLayout.build(*LAYOUT, device="cuda")
    streams = [randn(sum(lengths), heads, 128).requires_grad_() for lengths in LAYOUT]
    norms = tuple(norm(128, eps=1e-6).to("cuda", streams[0].dtype).requires_grad_(False) for _ in range(2))
    for each in norms:
        each.weight.data.copy_(randn(128))
    angle = torch.randn(sum(map(len, streams)), 64, device="cuda")
    rotary = torch.stack([angle.cos(), angle.sin()], dim=-1)[:, None]
    given = randn(len(angle), heads, 128)

    def gradients(streams, norms):
        out = join_turned_heads(layout, *streams, norms, rotary)
        return torch.autograd.grad(out, streams, given.to(out.dtype))

    actual = (torch.compile(gradients, dynamic=True) if compiled else gradients)(streams, norms)
    monkeypatch.setattr(fused, "possible", lambda x: False)
    plain = gradients(streams, norms)
    exact = gradients([x.detach().float().requires_grad_() for x in streams], [copy.deepcopy(n).float() for n in norms])
    for one, other, true in zip(actual, plain, exact, strict=True):
        assert (one.float() - true).norm() <= (other.float() - true).norm() + 1e-4 * true.norm()


def test_products_around_a_gelu(randn):
    tokens, first, second = randn(300, 256), randn(300, 256), randn(300, 1024)
    inner, outer = (nn.Linear(*size).to("cuda", tokens.dtype) for size in ((256, 1024), (1280, 256)))
    assert_same(lambda: linear_of_two(outer, first, second))
    assert_same(lambda: gelu_beside(inner, outer, tokens, first))


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image-edit-plus", "flux2", "flux3", "qwen-image-2.1"])
def test_a_whole_transformer(name, adapter, monkeypatch):
    family = get_family(name)
    transformer = family.tiny(0).transformer.to("cuda", torch.bfloat16)
    if adapter:
        inject(transformer, LoraSettings(rank=4), family.facts.lora_targets, seed=0)
        for key, parameter in transformer.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.1)
    shapes = [[(1, 4, 6), (1, 5, 3)], [(1, 8, 8)], [(1, 3, 3), (1, 3, 3), (1, 7, 2)]]
    if name != "flux-kontext":
        shapes[1].append((1, 4, 4))
    tokens = sum(rows * columns for sample in shapes for _, rows, columns in sample)
    generator = torch.Generator("cuda").manual_seed(1)

    def numbers(*size):
        return torch.randn(*size, device="cuda", generator=generator).bfloat16()

    widths = family.widths(transformer)
    grids = [Shapes(tuple(sample[:1]), tuple(sample[1:])) for sample in shapes]
    text = [
        TextEmbedding(
            numbers(n, widths.text), numbers(widths.pooled) if widths.pooled else None, places=(1,) * len(grid.controls)
        )
        for n, grid in zip((5, 9, 2), grids, strict=True)
    ]
    images = numbers(tokens, widths.image)
    inputs = ModelInputs(images, grids, text, torch.tensor([0.2, 0.9, 0.5], device="cuda"), 3.5)
    used = []
    monkeypatch.setattr(fused, "add_gated", lambda *args, own=fused.add_gated: (used.append(1), own(*args))[1])
    with torch.no_grad():
        actual = family.velocity(transformer, inputs).float()
        monkeypatch.setattr(fused, "ready", lambda tokens: False)
        plain = family.velocity(transformer, inputs).float()
        exact = family.velocity(transformer.float(), inputs).float()
    assert used, "the kernels were not used"
    assert (actual - exact).norm() <= 1.2 * (plain - exact).norm() + 1e-3 * exact.norm()
