"""One embedding in a file that can tell whether it is whole.

An entry is an ordinary safetensors file. Its metadata holds its own name, and two checksums over the header (without
them) and the data: `sha256`, which is checked when a process reads an entry for the first time, and by `qflux cache
verify`; and `sum`, which costs next to nothing and is checked in later epochs. Equal contents under equal names give
equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

VERSION = "2.0"

Bytes = NDArray[np.uint8]
_NO_SUM, _NO_SHA = "0" * 8, "0" * 64
_BLOCK = 4096
"""Words of 64 bits."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


class BrokenEntry(Exception):  # noqa: N818  (says what is wrong; callers make errors for users of it)
    """Why a file is not a whole entry."""


def dump(tensors: Mapping[str, Tensor], name: str = "") -> bytes:
    """The bytes of an entry that will be known by `name`."""
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {"format": "pt", "version": VERSION, "name": name}
    header["__metadata__"] |= {"sum": _NO_SUM, "sha256": _NO_SHA}
    bare = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    bare += b" " * (-len(bare) % 8)
    body = memoryview(data)[8 + length :]
    final = _with_checksums(bare, {"sum": _NO_SUM, "sha256": _NO_SHA}, _sum(bare, body), _sha256(bare, body))
    return len(final).to_bytes(8, "little") + final + bytes(body)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of contents, whatever file they are in."""
    return hashlib.sha256(dump(tensors)).hexdigest()


def read(path: Path, name: str = "", exactly: bool = True) -> dict[str, Tensor]:
    """The tensors of an entry. A damaged file, or another entry, is a `BrokenEntry`; a missing one an `OSError`.

    `exactly` checks the strong checksum too; the other one does not see two words that have changed places.
    """
    buffer = _bytes(path)
    parsed = _parse(buffer, name)
    for kind, checksum in (("sum", _sum), ("sha256", _sha256))[: 1 + exactly]:
        if parsed.metadata.get(kind) != checksum(parsed.bare, buffer[parsed.start :].data):
            raise BrokenEntry("its contents do not fit its checksum")
    data = torch.from_numpy(buffer[parsed.start :])
    return {
        name: data[item.begin : item.begin + item.count * item.dtype.itemsize].view(item.dtype).view(item.shape)
        for name, item in parsed.tensors.items()
    }


def is_whole(path: Path, name: str = "") -> bool:
    """The file has the length that its header says; nothing else is looked at."""
    try:
        _parse(_bytes(path), name)
    except (BrokenEntry, OSError):
        return False
    return True


@dataclass(frozen=True)
class _Item:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    count: int


@dataclass(frozen=True)
class _Parsed:
    tensors: dict[str, _Item]
    metadata: dict[str, str]
    bare: bytes
    """The header with zeros for the checksums."""
    start: int
    """Where the data begin."""


def _bytes(path: Path) -> Bytes:
    """The file, mapped: checking it is then the only time that its bytes are read. Writing to it writes to a copy."""
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        if size == 0:
            raise BrokenEntry("it is empty")
        return np.frombuffer(mmap.mmap(file, size, access=mmap.ACCESS_COPY), np.uint8)
    finally:
        os.close(file)


def _parse(buffer: Bytes, name: str) -> _Parsed:
    start = 8 + int.from_bytes(buffer[:8].tobytes(), "little")
    if not 8 < start <= len(buffer):
        raise BrokenEntry("it is cut off")
    try:
        raw = buffer[8:start].tobytes()
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        if metadata.get("version") != VERSION:
            raise BrokenEntry(f"its version is {metadata.get('version')!r}, not {VERSION!r}")
        if metadata.get("name") != name:
            raise BrokenEntry(f"it is the entry {metadata.get('name')!r}, not {name!r}")
        tensors = {key: _item(**value) for key, value in header.items()}
        bare = _with_checksums(raw, metadata, _NO_SUM, _NO_SHA)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenEntry(f"its header can't be read: {error}") from None
    end = max((item.begin + item.count * item.dtype.itemsize for item in tensors.values()), default=0)
    if end != len(buffer) - start:
        raise BrokenEntry(f"it has {len(buffer) - start} bytes of data, not {end}")
    return _Parsed(tensors, metadata, bare, start)


def _item(dtype: str, shape: list[int], data_offsets: list[int]) -> _Item:
    begin, end = data_offsets
    count = math.prod(shape)
    kind = _DTYPES[dtype]
    if count * kind.itemsize != end - begin or begin < 0 or count < 1:
        raise ValueError(f"shape {shape} does not fit {end - begin} bytes")
    return _Item(kind, tuple(shape), begin, count)


def _sum(header: bytes, data: memoryview) -> str:
    """A CRC of the header and of the sums of all blocks of 32 KiB: notes changed bytes, and blocks out of place."""
    words = np.frombuffer(data, dtype="<u8", count=len(data) // 8)
    whole = len(words) // _BLOCK * _BLOCK
    blocks = words[:whole].reshape(-1, _BLOCK).sum(1, dtype=np.uint64)
    tail = bytes(data[8 * whole :])
    return f"{zlib.crc32(tail, zlib.crc32(blocks.tobytes(), zlib.crc32(header))):08x}"


def _with_checksums(header: bytes, metadata: Mapping[str, str], total: str, sha256: str) -> bytes:
    """A header with other checksums than those it has."""
    for name, new in (("sum", total), ("sha256", sha256)):
        header = header.replace(f'"{name}":"{metadata[name]}"'.encode(), f'"{name}":"{new}"'.encode(), 1)
    return header


def _sha256(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
