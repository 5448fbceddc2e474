"""A recomputed block that keeps what attention gave: the same gradients to the bit, and the kernel runs once."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qflux.memory import hosting
from qflux.memory.hosting import HostMemory
from qflux.memory.recomputation import Recomputation
from qflux.ragged.recomputed import kept
from qflux.ragged.recomputed.kept import fused


class Kernel:
    """Attention that counts how often it runs, and remembers what it gave."""

    def __init__(self) -> None:
        self.runs = 0
        self.given: list[weakref.ref[Tensor]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.runs += 1
        self.given += [weakref.ref(each.untyped_storage()) for each in (query, key, value)]
        return F.scaled_dot_product_attention(query, key, value)


class Block(nn.Module):
    """Attention several times, over parts of its tokens, from one product for all or from three."""

    def __init__(self, kernel: Kernel, shares_memory: bool, cuts: list[int]) -> None:
        super().__init__()
        self.kernel, self.cuts = kernel, cuts
        widths = [48] if shares_memory else [16] * 3
        self.inner = nn.ModuleList(nn.Linear(16, width) for width in widths)
        self.out = nn.Linear(16, 16)

    def forward(self, tokens: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        joint = torch.cat([tokens, other])
        parts = torch.cat([layer(joint) for layer in self.inner], dim=-1) if len(self.inner) == 3 else None
        parts = self.inner[0](joint) if parts is None else parts
        query, key, value = (part.unflatten(-1, (2, 8)) for part in parts.chunk(3, dim=-1))
        pieces = []
        for q, k, v in zip(*(each.split(self.cuts) for each in (query, key, value)), strict=True):
            heads = (each[None].transpose(1, 2) for each in (q, k, v))
            pieces.append(fused(self.kernel, *heads).squeeze(0).transpose(0, 1))
        joint = joint + self.out(torch.cat(pieces).flatten(1))
        return joint[: len(tokens)], joint[len(tokens) :]


def gradients(blocks: list[Block], rows: tuple[int, int], run) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(count, 16, generator=generator).requires_grad_() for count in rows)
    tokens, other = first * 1, second * 1
    for block in blocks:
        block.zero_grad()
        tokens, other = run(block, tokens, other)
    (tokens.square().sum() + other.square().sum()).backward()
    return [first.grad, second.grad, *(p.grad.clone() for block in blocks for p in block.parameters())]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_kept_attention_and_hosted_inputs_give_the_same_gradients_to_the_bit(data):
    cuts = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4), label="samples")
    count = data.draw(st.integers(1, 4), label="blocks")
    chosen = data.draw(st.sets(st.integers(0, count - 1)), label="recomputed")
    keeps, hosts = data.draw(st.booleans(), label="keeps"), data.draw(st.booleans(), label="hosts")
    torch.manual_seed(0)
    kernel = Kernel()
    blocks = [Block(kernel, data.draw(st.booleans()), cuts) for _ in range(count)]
    rows = data.draw(st.integers(0, sum(cuts)), label="rows of the first stream")
    sizes = (rows, sum(cuts) - rows)
    expected = gradients(blocks, sizes, lambda block, *args: block(*args))
    recomputed = {id(blocks[place]) for place in chosen}
    run = Recomputation(recomputed, keeps, HostMemory() if hosts else None)
    for _ in range(2):
        kernel.runs = 0
        found = gradients(blocks, sizes, run)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert kernel.runs == len(cuts) * (count if keeps else count + len(chosen))


def test_queries_keys_and_values_are_gone_until_they_are_computed_again():
    kernel = Kernel()
    blocks = [Block(kernel, True, [5, 3]) for _ in range(3)]
    run = Recomputation({id(block) for block in blocks}, keeps_attention=True)
    tokens, other = torch.randn(4, 16).requires_grad_() * 1, torch.randn(4, 16).requires_grad_() * 1
    for block in blocks:
        tokens, other = run(block, tokens, other)
    gc.collect()
    assert all(reference() is None for reference in kernel.given)
    (tokens.sum() + other.sum()).backward()


def test_hosted_inputs_leave_nothing_behind_if_there_is_no_backward_pass():
    hosted = HostMemory()
    blocks = [Block(Kernel(), False, [8]) for _ in range(3)]
    run = Recomputation({id(block) for block in blocks}, hosted=hosted)
    for _ in range(2):
        tokens, other = torch.randn(4, 16).requires_grad_() * 1, torch.randn(4, 16).requires_grad_() * 1
        for block in blocks:
            tokens, other = run(block, tokens, other)
        del tokens, other
        gc.collect()
        hosted._forget()
        assert not hosted._blocks


def test_an_interrupted_pass_and_attention_without_a_gradient_leave_nothing_behind():
    """What a call keeps must not hold the call: nobody could see that both are garbage."""
    kernel = Kernel()
    blocks = [Block(kernel, True, [5, 3]) for _ in range(3)]
    run = Recomputation({id(block) for block in blocks}, keeps_attention=True)
    made: list[weakref.ref[object]] = []
    known = kept._Call.__init__
    kept._Call.__init__ = lambda self, kernel, send: made.append(weakref.ref(self)) or known(self, kernel, send)
    try:
        tokens, other = torch.randn(4, 16).requires_grad_() * 1, torch.randn(4, 16).requires_grad_() * 1
        for block in blocks:
            tokens, other = run(block, tokens, other)
        del tokens, other
        gc.collect()
        assert len(made) == 6
        assert all(reference() is None for reference in made)
        frozen = Block(kernel, True, [5, 3]).requires_grad_(False)
        run = Recomputation({id(frozen)}, keeps_attention=True)
        trained = torch.nn.Parameter(torch.ones(16))
        tokens, _ = run(frozen, torch.randn(4, 16), torch.randn(4, 16))
        (tokens * trained).sum().backward()
        assert len(made) == 6, "nothing of it will be asked for again"
    finally:
        kept._Call.__init__ = known


def test_inputs_are_sent_for_before_they_are_needed(monkeypatch):
    """Blocks of two inputs: when one runs backward, both inputs of the next are on their way."""
    ready: list[bool] = []
    arrived = hosting._Parcel.arrived
    monkeypatch.setattr(
        hosting._Parcel, "arrived", lambda self, place: ready.append(self._device is not None) or arrived(self, place)
    )
    # On a CPU nothing leaves by itself.
    monkeypatch.setattr(hosting._Parcel, "has_left", lambda self: setattr(self, "_device", None))
    hosted = HostMemory()
    blocks = [Block(Kernel(), False, [8]) for _ in range(6)]
    run = Recomputation({id(block) for block in blocks}, hosted=hosted)
    gradients(blocks, (4, 4), run)
    assert len(ready) == 12
    assert all(ready), ready


@pytest.mark.parametrize("keeps", [False, True])
def test_without_a_gradient_nothing_is_recorded(keeps):
    kernel = Kernel()
    block = Block(kernel, True, [8])
    with torch.no_grad():
        Recomputation({id(block)}, keeps)(block, torch.randn(4, 16), torch.randn(4, 16))
    assert kernel.runs == 1


def test_what_attention_gave_waits_on_the_host_beside_the_inputs():
    """Of all blocks but those whose copies may still be under way."""
    given: list[weakref.ref[object]] = []

    class Watched(Kernel):
        def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = super().__call__(query, key, value)
            given.append(weakref.ref(out.untyped_storage()))
            return out

    kernel = Watched()
    blocks = [Block(kernel, True, [5, 3]) for _ in range(6)]
    run = Recomputation({id(block) for block in blocks}, keeps_attention=True, hosted=HostMemory())
    tokens, other = torch.randn(4, 16).requires_grad_() * 1, torch.randn(4, 16).requires_grad_() * 1
    for block in blocks:
        tokens, other = run(block, tokens, other)
    gc.collect()
    assert [reference() is None for reference in given] == [True] * 8 + [False] * 4
    (tokens.sum() + other.sum()).backward()
    assert kernel.runs == 12


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_backward_pass_that_went_no_further_spoils_no_later_one(order, monkeypatch):
    """What was sent for and not used has lost its place to another block by then."""
    _with_places(monkeypatch)
    torch.manual_seed(0)
    blocks = [Block(Kernel(), True, [5, 3]) for _ in range(6)]
    parameters = [p for block in blocks for p in block.parameters()]

    def results(run) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        tokens, other = (torch.randn(4, 16, generator=generator).requires_grad_() * 1 for _ in range(2))
        for block in blocks:
            tokens, other = run(block, tokens, other)
        loss, found = tokens.square().sum() + other.square().sum(), []
        for number in order:  # how far back each of these goes
            wanted = parameters[len(parameters) // 3 * number :]
            found += torch.autograd.grad(loss, wanted, retain_graph=True)
        return found

    run = Recomputation({id(block) for block in blocks}, hosted=HostMemory())
    for one, other in zip(results(run), results(lambda block, *args: block(*args)), strict=True):
        assert torch.equal(one, other)


def _with_places(monkeypatch) -> None:
    """Let what comes back from the host take turns in memory, as on a GPU."""
    monkeypatch.setattr(hosting._Parcel, "has_left", lambda self: setattr(self, "_device", None))

    def send_back(self, place) -> None:
        if self._device is None:
            self._device = place(self, self._host).copy_(self._host)

    monkeypatch.setattr(hosting._Parcel, "send_back", send_back)
    made = HostMemory.__init__
    monkeypatch.setattr(HostMemory, "__init__", lambda self: (made(self), setattr(self, "_places", Places()))[0])


class Places(dict):
    """Memory that is there before it is asked for: there is no GPU to take it from."""

    def get(self, key, default=None):
        return self.setdefault(key, torch.empty(2**16, dtype=torch.uint8))
