"""Frozen models on a device without room for them: what stays, what waits, and images in tiles at need."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext

import pytest
import torch
from diffusers import AutoencoderKLFlux2
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from qflux.data.encoded import TextLimit
from qflux.errors import ConfigError
from qflux.memory.counting import MemoryCount
from qflux.memory.placing import Divided, free_memory, model_bytes, place
from qflux.memory.streaming import SLOTS
from qflux.models import get_family
from qflux.models.encoding import _tiles, encoder_of

CPU = torch.device("cpu")


class Model(nn.Module):
    """Chains of blocks, each with a list inside that is no chain, between layers that are not in any."""

    def __init__(self, *chains: int, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.chains = nn.ModuleList(nn.ModuleList(self._block(width) for _ in range(count)) for count in chains)
        self.requires_grad_(False)

    @staticmethod
    def _block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.ModuleList([nn.Tanh()])[0], nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for chain in self.chains:
            for block in chain:
                x = x + block(x)
        return x


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_as_few_blocks_wait_as_must_and_the_result_is_the_same(data):
    torch.manual_seed(0)
    counts = data.draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=3), label="chains")
    models = [Model(*chains) for chains in counts]
    plain, divided = copy.deepcopy(models), [Divided.of(model) for model in models]
    least, whole = (sum(each.bytes(getattr(each, which)) for each in divided) for which in ("all", "none"))
    room = data.draw(st.integers(least, max(least, whole)), label="room")
    place(models, CPU, room)
    x = torch.randn(3, 8)
    for model, other in zip(models, plain, strict=True):
        assert torch.equal(model(x), other(x))
    slots = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for m in models for p in m.parameters()}
    aligned = 512 * sum(1 for m in models for _ in m.parameters())
    assert sum(slots.values()) <= room + aligned


def test_what_has_first_choice_stays(caplog):
    first, second = Model(8), Model(8)
    room = model_bytes(first) + Divided.of(second).bytes(Divided.of(second).all)
    caplog.set_level(logging.INFO)
    place([first, second], CPU, room)
    assert [record.message for record in caplog.records] == ["Model: 8 of 8 blocks wait in host memory"]
    assert len({p.untyped_storage().data_ptr() for p in second.chains[0].parameters()}) == SLOTS
    assert len({p.untyped_storage().data_ptr() for p in first.chains[0].parameters()}) == 8 * 4


def test_too_little_for_anything_is_told_before_anything_is_moved():
    model = Model(8)
    where = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=r"(?s)left for Model.*raise `memory`"):
        place([model], CPU, 100)
    assert [parameter.data_ptr() for parameter in model.parameters()] == where


def test_what_is_left_free_is_a_wish():
    """An image needs room, too; but a model that could run without is not refused because of it."""
    model = Model(8)
    least = Divided.of(model).bytes(Divided.of(model).all)
    place([model], CPU, least + 10, workspace=10**9)
    assert len({p.untyped_storage().data_ptr() for p in model.chains[0].parameters()}) == SLOTS
    place([], CPU, 0, workspace=10**9)


def test_nobody_counts_the_memory_of_a_cpu_unless_asked():
    assert free_memory(CPU, None) is None
    assert free_memory(CPU, 10**9) == 10**9


@pytest.mark.parametrize("name", ["flux-kontext", "flux2", "flux3", "qwen-image-edit", "qwen-image-2.1"])
def test_an_image_that_does_not_fit_is_taken_in_tiles_and_the_next_one_whole_again(name, caplog, monkeypatch):
    family = get_family(name)
    components = family.tiny(0)
    encoder = encoder_of(family, components, TextLimit(64))
    vae, side = components.vae, 256 // family.pixels_per_token
    pixels = torch.randn(family.has_alpha + 3, 256, 256, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    (whole,) = encoder.encode_images([pixels])
    drawn = encoder.decode_image(whole, (1, side, side))
    known = {method: getattr(vae, method) for method in ("encode", "decode")}

    def full(method):
        def run(*args, **options):
            if not vae.use_tiling:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return known[method](*args, **options)

        return run

    for method in known:
        monkeypatch.setattr(vae, method, full(method))
    caplog.set_level(logging.WARNING)
    tile = getattr(vae, "tile_sample_min_size", None)
    first, tiled = encoder.encode_images([pixels, pixels])
    assert torch.equal(first, tiled)
    assert getattr(vae, "tile_sample_min_size", None) == tile
    again = encoder.decode_image(whole, (1, side, side))
    assert tiled.shape == whole.shape
    assert again.shape == drawn.shape
    assert sum("overlapping tiles" in record.message for record in caplog.records) == 3
    monkeypatch.undo()
    assert torch.equal(encoder.encode_images([pixels])[0], whole)

    def never(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(vae, "decode", never)
    with pytest.raises(torch.OutOfMemoryError):
        encoder.decode_image(whole, (1, side, side))


def test_tiles_of_a_published_vae_take_less_memory_than_a_megapixel():
    """Left to itself, it takes images of up to 1024 pixels as a whole."""
    with torch.device("meta"):
        vae = AutoencoderKLFlux2().eval().requires_grad_(False)
        latents = torch.empty(1, 32, 128, 128)
    peaks = []
    for tiled in (False, True):
        way = _tiles(vae) if tiled else nullcontext()
        with torch.no_grad(), way, MemoryCount([*vae.parameters(), *vae.buffers()]) as count:
            vae.decode(latents)
        peaks.append(count.peak)
    assert peaks[1] < 0.4 * peaks[0]
