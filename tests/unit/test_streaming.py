"""Blocks whose weights come from the host when it is their turn compute what they would compute anyway."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from qflux.memory.streaming import SLOTS, StreamedBlocks, spread


class Block(nn.Module):
    """A frozen layer and a trained one; blocks have different sizes inside."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.requires_grad_(False)
        self.trained = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x))) + self.trained(x)


def network(inner: list[int]) -> list[Block]:
    torch.manual_seed(0)
    return [Block(6, width) for width in inner]


def gradients(blocks: list[Block], x: torch.Tensor) -> list[torch.Tensor]:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    x.square().sum().backward()
    return [block.trained.weight.grad.clone() for block in blocks]


@settings(max_examples=40, deadline=None)
@given(inner=st.lists(st.integers(1, 9), min_size=1, max_size=8), data=st.data())
def test_streamed_blocks_give_the_same_outputs_and_gradients_step_after_step(inner, data):
    plain = network(inner)
    blocks = copy.deepcopy(plain)
    count = data.draw(st.integers(1, len(inner)), label="streamed")
    chosen = spread(count, len(inner))
    assert len(set(chosen)) == count
    streamed = StreamedBlocks([blocks[place] for place in chosen], torch.device("cpu"))
    assert len(streamed._slots) == min(SLOTS, count)
    for seed in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():  # a validation in between, which goes forward only
            seen, expected = x, x
            for block, other in zip(blocks, plain, strict=True):
                seen, expected = block(seen), other(expected)
        assert torch.equal(seen, expected)
        for found, wanted in zip(gradients(blocks, x), gradients(plain, x), strict=True):
            assert torch.equal(found, wanted)


def test_the_device_holds_a_few_blocks_and_the_host_all_of_them():
    blocks = network([50] * 10)
    size = sum(p.numel() * 4 for p in blocks[0].parameters() if not p.requires_grad)
    streamed = StreamedBlocks(blocks, torch.device("cpu"))
    on_device = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for b in blocks for p in b.parameters()
                 if not p.requires_grad}  # fmt: skip
    assert len(on_device) == SLOTS == 2
    assert sum(on_device.values()) <= SLOTS * (size + 3 * 512)
    assert streamed.host_bytes >= 10 * size
    trained = {block.trained.weight.untyped_storage().data_ptr() for block in blocks}
    assert len(trained) == 10, "what trains stays where it is"


def test_without_recomputation_a_backward_pass_would_see_other_weights():
    """Why streamed blocks are recomputed: a test that the test above could fail."""
    plain = network([5] * 6)
    blocks = copy.deepcopy(plain)
    StreamedBlocks(blocks, torch.device("cpu"))
    x = torch.randn(4, 6)

    def stored(chain: list[Block]) -> torch.Tensor:
        y = x
        for block in chain:
            y = block(y)
        y.square().sum().backward()
        return chain[0].trained.weight.grad

    with pytest.raises((RuntimeError, AssertionError)):
        assert torch.equal(stored(blocks), stored(plain))


def test_streamed_blocks_are_gone_when_their_model_is():
    """Without the garbage collector: what waits in host memory is gigabytes."""
    blocks = network([5] * 6)
    StreamedBlocks(blocks, torch.device("cpu"))
    alive = [weakref.ref(block) for block in blocks]
    gc.disable()
    try:
        del blocks
        assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


def test_blocks_that_share_a_weight_are_refused():
    blocks = network([5] * 4)
    blocks[2].first = blocks[0].first
    with pytest.raises(ValueError, match="share a weight"):
        StreamedBlocks(blocks, torch.device("cpu"))
