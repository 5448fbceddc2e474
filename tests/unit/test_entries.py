from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from qflux.cache import tensor_file
from qflux.cache.tensor_file import BrokenEntry

TENSORS = {"tokens": torch.randn(7, 5), "pooled": torch.randn(3).bfloat16()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensor_file") / "entry.safetensors"
    path.write_bytes(tensor_file.dump(TENSORS))
    return path


def test_an_entry_is_an_ordinary_safetensors_file(written):
    for name, tensor in load_file(written).items():
        assert torch.equal(tensor, TENSORS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 4)])
def test_what_is_read_is_what_was_written(tmp_path, dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    (tmp_path / "e").write_bytes(tensor_file.dump({"a": tensor, "b": tensor[:1].float()}))
    read = tensor_file.read(tmp_path / "e")
    assert torch.equal(read["a"], tensor)
    assert torch.equal(read["b"], tensor[:1].float())
    tensor_file.read(tmp_path / "e")


def test_equal_contents_give_equal_bytes():
    assert tensor_file.dump(TENSORS) == tensor_file.dump(dict(reversed(TENSORS.items())))
    assert tensor_file.digest(TENSORS) != tensor_file.digest(TENSORS | {"pooled": torch.zeros(3).bfloat16()})


@settings(max_examples=400, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255))
def test_any_changed_byte_is_noticed(written, place, value):
    """The quick look may let some pass, but only what was written."""
    data = bytearray(written.read_bytes())
    data[int(place * len(data))] ^= value
    changed = written.with_name("changed")
    changed.write_bytes(data)
    with pytest.raises(BrokenEntry):
        tensor_file.read(changed)
    try:
        found = tensor_file.read(changed, exactly=False)
    except BrokenEntry:
        return
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@settings(max_examples=100, deadline=None)
@given(length=st.floats(0, 1, exclude_max=True))
def test_any_truncation_is_noticed(written, length):
    data = written.read_bytes()
    short = written.with_name("short")
    short.write_bytes(data[: int(length * len(data))])
    for exactly in (True, False):
        with pytest.raises(BrokenEntry):
            tensor_file.read(short, exactly=exactly)


def test_more_bytes_than_written_are_noticed(written):
    longer = written.with_name("longer")
    longer.write_bytes(written.read_bytes() + b"\0" * 8)
    with pytest.raises(BrokenEntry, match="bytes of data"):
        tensor_file.read(longer)


def test_blocks_out_of_place_are_noticed(tmp_path):
    halves = torch.randn(2, 64 * 1024)
    (tmp_path / "e").write_bytes(tensor_file.dump({"a": halves}))
    data = bytearray((tmp_path / "e").read_bytes())
    half = halves[0].numel() * 4
    data[-2 * half : -half], data[-half:] = data[-half:], data[-2 * half : -half]
    (tmp_path / "e").write_bytes(data)
    with pytest.raises(BrokenEntry, match="checksum"):
        tensor_file.read(tmp_path / "e")


def test_words_that_change_places_are_noticed_when_an_entry_is_read_for_the_first_time(tmp_path):
    (tmp_path / "e").write_bytes(tensor_file.dump({"a": torch.randn(32768)}))
    data = bytearray((tmp_path / "e").read_bytes())
    data[-800:-792], data[-8:] = data[-8:], data[-800:-792]
    (tmp_path / "e").write_bytes(data)
    tensor_file.read(tmp_path / "e", exactly=False)
    with pytest.raises(BrokenEntry, match="checksum"):
        tensor_file.read(tmp_path / "e")


def test_an_entry_knows_its_name(tmp_path):
    (tmp_path / "e").write_bytes(tensor_file.dump(TENSORS, "text/a"))
    assert tensor_file.is_whole(tmp_path / "e", "text/a")
    tensor_file.read(tmp_path / "e", "text/a")
    with pytest.raises(BrokenEntry, match="it is the entry 'text/a', not 'text/b'"):
        tensor_file.read(tmp_path / "e", "text/b")


def test_a_foreign_safetensors_file_is_no_entry(tmp_path):
    from safetensors.torch import save_file

    save_file({"tokens": torch.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(BrokenEntry):
        tensor_file.read(tmp_path / "foreign")
    save_file({"tokens": torch.zeros(2)}, tmp_path / "foreign", {"version": "9.0"})
    with pytest.raises(BrokenEntry, match=r"version is '9\.0'"):
        tensor_file.read(tmp_path / "foreign")
