"""A frozen layer and its LoRA as one product: what PEFT computes, with its gradients, and nothing kept beside."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from qflux.adapters.lora import LoRALinear
from qflux.models.mlp import linear_of_two
from qflux.ragged.compilation import compile_blocks
from qflux.ragged.recomputed.unread import LastLinear, leaving_out


def layers(seed: int, dtype: torch.dtype = torch.float64, **options: object) -> tuple[LoRALinear, PeftLinear]:
    """One of ours and PEFT's own, with the same random weights."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(draw.randint(2, 40), draw.randint(1, 40), bias=seed % 2 == 0))
    settings = {"r": draw.randint(1, 5), "lora_alpha": draw.uniform(0.5, 8), "target_modules": ["0"], **options}
    inject_adapter_in_model(LoraConfig(**settings), model.requires_grad_(False))
    stock = model[0].to(dtype)
    assert type(stock) is PeftLinear
    nn.init.normal_(stock.lora_B["default"].weight)
    ours = copy.deepcopy(stock)
    ours.__class__ = LoRALinear
    return ours, stock


def outcome(
    layer: nn.Module, x: Tensor, upstream: Tensor, *, goes_on: bool = True, of_two: bool = False
) -> list[Tensor]:
    """What a layer gives, and all its gradients."""
    x = x.clone().requires_grad_(goes_on)
    given = x.split([1, x.shape[-1] - 1], dim=-1) if of_two else [x]
    out = linear_of_two(layer, *given) if of_two else layer(*given)
    trained = [p for p in layer.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out, [*trained, x] if goes_on else trained, upstream)]


def assert_same(ours: list[Tensor], stock: list[Tensor], **tolerance: float) -> None:
    assert len(ours) == len(stock)
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("goes_on", [True, False], ids=["in the middle", "first"])
@pytest.mark.parametrize("seed", range(12))
def test_it_gives_what_peft_gives_and_its_gradients(seed, goes_on):
    ours, stock = layers(seed)
    shape = [(7,), (2, 5), (1, 3), (0,)][seed % 4]
    x = torch.randn(*shape, ours.in_features, dtype=torch.float64)
    upstream = torch.randn(*shape, ours.out_features, dtype=torch.float64)
    assert ours._is_plain(x)
    assert_same(outcome(ours, x, upstream, goes_on=goes_on), outcome(stock, x, upstream, goes_on=goes_on))


@pytest.mark.parametrize("seed", range(8))
def test_channels_of_two_tensors_are_those_of_one(seed):
    ours, stock = layers(seed)
    x = torch.randn(6, ours.in_features, dtype=torch.float64)
    upstream = torch.randn(6, ours.out_features, dtype=torch.float64)
    assert_same(outcome(ours, x, upstream, of_two=True), outcome(stock, x, upstream))


def test_in_half_precision_it_is_nearer_than_peft_to_what_is_right():
    errors = [0.0, 0.0]
    for seed in range(20):
        exact = layers(seed)[1]
        x = torch.randn(30, exact.in_features)
        upstream = torch.randn(30, exact.out_features)
        right = outcome(exact, x.double(), upstream.double())
        for place, layer in enumerate(layers(seed, torch.bfloat16)):
            for tensor in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
                tensor.data = tensor.data.float()
            layer.cast_input_dtype_enabled = False
            if place:  # PEFT does not compute in the dtype of its input
                layer.to(torch.bfloat16)
            found = outcome(layer, x.bfloat16(), upstream.bfloat16())
            errors[place] += sum(((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True))
    assert errors[0] < errors[1]


def test_weights_that_train_keep_gradients_in_their_own_dtype():
    ours, _ = layers(0, torch.bfloat16)
    ours.cast_input_dtype_enabled = False
    for part in (ours.lora_A, ours.lora_B):
        part["default"].weight.data = part["default"].weight.data.float()
    x = torch.randn(4, ours.in_features, dtype=torch.bfloat16, requires_grad=True)
    ours(x).sum().backward()
    assert ours.lora_A["default"].weight.grad.dtype == ours.lora_B["default"].weight.grad.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_nothing_is_kept_for_the_backward_pass_but_what_was_given():
    ours, _ = layers(0)
    x = torch.randn(9, ours.in_features, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours(x)
    given = {x.data_ptr(), *(p.data_ptr() for p in ours.parameters())}
    assert {tensor.data_ptr() for tensor in kept} <= given


def test_a_product_that_nobody_reads_is_left_out_and_gradients_are_the_same():
    ours, _ = layers(2)
    ours.base_layer.__class__ = LastLinear
    x = torch.randn(6, ours.in_features, dtype=torch.float64)
    upstream = torch.randn(6, ours.out_features, dtype=torch.float64)
    expected = outcome(ours, x, upstream)
    with leaving_out():
        found = outcome(ours, x, upstream)
    assert_same(found[1:], expected[1:], rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_either_factor_may_be_frozen(frozen):
    for goes_on in (True, False):
        ours, stock = layers(3)
        for layer in (ours, stock):
            getattr(layer, frozen).requires_grad_(False)
        x = torch.randn(4, ours.in_features, dtype=torch.float64)
        upstream = torch.randn(4, ours.out_features, dtype=torch.float64)
        assert_same(outcome(ours, x, upstream, goes_on=goes_on), outcome(stock, x, upstream, goes_on=goes_on))


def test_a_lora_that_adds_nothing_changes_no_bit():
    ours, _ = layers(4, torch.bfloat16)
    nn.init.zeros_(ours.lora_B["default"].weight)
    x = torch.randn(50, ours.in_features, dtype=torch.bfloat16)
    for given in ([x], x.split([1, ours.in_features - 1], dim=1)):
        with_lora = ours(*given) if len(given) == 1 else linear_of_two(ours, *given)
        ours._disable_adapters = True
        without = ours(*given) if len(given) == 1 else linear_of_two(ours, *given)
        ours._disable_adapters = False
        assert torch.equal(with_lora, without)


SPECIAL = {
    "dropout": lambda layer: None,
    "DoRA": lambda layer: None,
    "disabled": lambda layer: setattr(layer, "_disable_adapters", True),
    "merged": lambda layer: layer.merge(),
    "a base that trains": lambda layer: layer.base_layer.requires_grad_(True),
    "watched": lambda layer: layer.base_layer.register_forward_hook(lambda *_: None),
    "watched backward": lambda layer: layer.lora_A["default"].register_full_backward_hook(lambda *_: None),
    "offloaded": lambda layer: setattr(layer.base_layer, "forward", layer.base_layer.forward),
    "two adapters": lambda layer: (
        layer.update_layer("other", r=2, lora_alpha=2, config=LoraConfig(r=2)),
        layer.set_adapter(["default", "other"]),
    ),
}
OPTIONS = {"dropout": {"lora_dropout": 0.5}, "DoRA": {"use_dora": True}}


@pytest.mark.parametrize("case", SPECIAL)
def test_what_is_more_than_a_lora_on_a_frozen_layer_computes_as_peft_does(case):
    ours, stock = layers(4, torch.float32, **OPTIONS.get(case, {}))
    for layer in (ours, stock):
        SPECIAL[case](layer)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(5, ours.in_features)
    assert not ours._is_plain(x)
    torch.manual_seed(1)
    expected = stock(x)
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x), expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_it_is_the_same_for_all_sizes_without_compiling_anew(backend):
    torch._dynamo.reset()
    counted = CompileCounterWithBackend(backend)
    ours, stock = layers(6, torch.float32)
    compiled = copy.deepcopy(ours)
    compile_blocks([compiled], backend=counted)
    for rows in (5, 9, 2):
        x, upstream = torch.randn(rows, ours.in_features), torch.randn(rows, ours.out_features)
        found = outcome(compiled, x, upstream)
        assert_same(found, outcome(ours, x, upstream), rtol=1e-5, atol=1e-5)
        assert_same(found, outcome(stock, x, upstream), rtol=1e-5, atol=1e-5)
    assert counted.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("grad", [True, False])
def test_code_around_it_compiles_whole(grad):
    torch._dynamo.reset()
    ours, _ = layers(8, torch.float32)
    x = torch.randn(5, ours.in_features)

    def around(x: Tensor) -> Tensor:
        return torch.tanh(linear_of_two(ours, *x.split([1, x.shape[1] - 1], dim=1)) + ours(x))

    with torch.set_grad_enabled(grad):
        found = torch.compile(around, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(found, around(x))
    torch._dynamo.reset()
