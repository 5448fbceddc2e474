"""The kernels around 8-bit products on a GPU compute what plain operations compute on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qflux.models.precision import EIGHT_BITS
from qflux.ragged.compilation import compile_blocks
from qflux.ragged.eightbit import mlp, product, rows
from qflux.ragged.eightbit.linear import EightBitLinear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = list(EIGHT_BITS.values())


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).bfloat16()


def assert_same_rows(found: rows.Rows, expected: rows.Rows) -> None:
    """A number may fall to the other side of a rounding where an ulp lies between; hardly any may."""
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-3, atol=0)
    one, other = (numbers.cpu().float() for numbers in (found[0], expected[0]))
    assert (one != other).float().mean() < 0.02
    assert ((one - other).abs() <= 1 + other.abs() / 8).all()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("width", [48, 3072, 15360, 36864])
def test_rows(randn, dtype, width):
    x, factor = randn(37, 2 * width)[:, ::1][:, :width] * 3, randn(width).float().abs()
    for given in (None, factor):
        found = rows.in_rows(x.cuda(), dtype, None if given is None else given.cuda())
        assert_same_rows(found, rows.in_rows(x, dtype, given))
    odd = x.clone()
    odd[3, 5] = torch.inf
    assert not rows.in_rows(odd.cuda(), dtype)[1][3].isfinite()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("beside", [0, 3072])
def test_rows_around_a_gelu(randn, dtype, beside):
    hidden, grad, factor = randn(37, 12288), randn(37, 12288), randn(12288).float().abs()
    other = randn(37, beside) if beside else None
    found = mlp.gelu_rows(hidden.cuda(), other.cuda() if beside else None, dtype, False)
    assert_same_rows(found, mlp.gelu_rows(hidden, other, dtype, False))
    found = mlp.gelu_gradient_rows(grad.cuda(), hidden.cuda(), factor.cuda(), dtype)
    assert_same_rows(found, mlp.gelu_gradient_rows(grad, hidden, factor, dtype))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 16), (300, 3072, 256), (129, 64, 9216)])
def test_products(randn, dtype, shape):
    tokens, depth, width = shape
    layer = nn.Linear(depth, width).requires_grad_(False)
    EightBitLinear.convert(layer, dtype)
    x = randn(tokens, depth)
    one = product.product(*rows.in_rows(x, dtype), layer.weight, layer.scale, layer.bias, torch.bfloat16, False)
    layer.cuda()
    other = product.product(
        *rows.in_rows(x.cuda(), dtype), layer.weight, layer.scale, layer.bias, torch.bfloat16, False
    )
    assert (one.float() - other.cpu().float()).norm() <= 0.01 * one.float().norm()
    assert torch.equal(product.turned(layer.weight).view(torch.int8), layer.weight.view(torch.int8).t())


@pytest.mark.parametrize("kind", EIGHT_BITS)
@pytest.mark.parametrize("joined", [False, True])
def test_layers_compiled_or_not_are_those_of_the_cpu(randn, kind, joined):
    """Two layers with a GELU between, as blocks have them, in one operation (`joined`) or layer by layer."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(128, 512), nn.Linear(640, 128), nn.RMSNorm(128)
            self.requires_grad_(False)
            for layer in (self.up, self.down):
                EightBitLinear.convert(layer, EIGHT_BITS[kind])

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            if joined:
                return x + mlp.gelu_mlp(self.up, self.down, normed, x)
            return x + self.down.of_two(x, F.gelu(self.up(normed), approximate="tanh"))

    torch.manual_seed(0)
    block = Block()
    x, upstream = randn(70, 128).float(), randn(70, 128).float()

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradient."""
        given = x.to(device, dtype).requires_grad_()
        out = block(given)
        return [each.detach().float().cpu() for each in (out, *torch.autograd.grad(out, given, upstream.to(out)))]

    expected = run("cpu", torch.float32)
    block.cuda().norm.bfloat16()
    for compiled in (False, True):
        if compiled:
            torch._dynamo.reset()
            compile_blocks([block])
        for one, other in zip(run("cuda", torch.bfloat16), expected, strict=True):
            assert F.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.998
    with torch._dynamo.config.patch(error_on_recompile=True):
        x, upstream = randn(133, 128).float(), randn(133, 128).float()
        run("cuda", torch.bfloat16)
