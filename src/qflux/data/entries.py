"""One embedding in a file that can tell whether it is whole.

An entry is an ordinary safetensors file. Its metadata holds two checksums over the header (without them) and the data:
`sum`, a sum of 64-bit words that costs nothing and is checked whenever an entry is read, and `sha256`, which
`qflux cache verify` checks. Equal contents give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

VERSION = "2.0"

Bytes = NDArray[np.uint8]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class BrokenEntry(Exception):  # noqa: N818  (says what is wrong; callers make errors for users of it)
    """Why a file is not a whole entry."""


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of an entry."""
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {"format": "pt", "version": VERSION}
    body = memoryview(data)[8 + length :]
    bare = _canonical(header)
    header["__metadata__"] |= {"sum": _sum(bare, body), "sha256": _sha256(bare, body)}
    final = _canonical(header)
    final += b" " * (-len(final) % 8)
    return len(final).to_bytes(8, "little") + final + bytes(body)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of contents, whatever file they are in."""
    return hashlib.sha256(dump(tensors)).hexdigest()


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of an entry. Anything but what was written is a `BrokenEntry`; a missing file is an `OSError`."""
    buffer = _bytes(path)
    parsed = _parse(buffer)
    if parsed.metadata.get("sum") != _sum(parsed.bare, buffer[parsed.start :].data):
        raise BrokenEntry("its contents do not fit its checksum")
    data = torch.from_numpy(buffer[parsed.start :])
    return {
        name: data[item.begin : item.begin + item.count * item.dtype.itemsize].view(item.dtype).view(item.shape)
        for name, item in parsed.tensors.items()
    }


def check(path: Path) -> None:
    """A `BrokenEntry` unless the file is exactly what was written, by its strong checksum."""
    buffer = _bytes(path)
    parsed = _parse(buffer)
    if parsed.metadata.get("sha256") != _sha256(parsed.bare, buffer[parsed.start :].data):
        raise BrokenEntry("its contents do not fit its checksum")


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
    """The header as it was before the checksums were added."""
    start: int
    """Where the data begin."""


def _bytes(path: Path) -> Bytes:
    """The file, mapped: checking it is then the only time that its bytes are read. Writing to it writes to a copy."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise BrokenEntry("it is empty")
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), np.uint8)


def _parse(buffer: Bytes) -> _Parsed:
    start = 8 + int.from_bytes(buffer[:8].tobytes(), "little")
    if not 8 < start <= len(buffer):
        raise BrokenEntry("it is cut off")
    try:
        header = json.loads(buffer[8:start].tobytes())
        metadata = header.pop("__metadata__")
        if metadata.get("version") != VERSION:
            raise BrokenEntry(f"its version is {metadata.get('version')!r}, not {VERSION!r}")
        tensors = {name: _item(**value) for name, value in header.items()}
        plain = {key: value for key, value in metadata.items() if key not in ("sum", "sha256")}
        bare = _canonical(header | {"__metadata__": plain})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenEntry(f"its header can't be read: {error}") from None
    end = max((item.begin + item.count * item.dtype.itemsize for item in tensors.values()), default=0)
    if end != len(buffer) - start:
        raise BrokenEntry(f"it has {len(buffer) - start} bytes of data, not {end}")
    return _Parsed(tensors, metadata, bare, start)


def _item(dtype: str, shape: list[int], data_offsets: list[int]) -> _Item:
    begin, end = data_offsets
    count = int(np.prod(shape, dtype=np.int64))
    kind = _DTYPES[dtype]
    if count * kind.itemsize != end - begin or begin < 0 or count < 1:
        raise ValueError(f"shape {shape} does not fit {end - begin} bytes")
    return _Item(kind, tuple(shape), begin, count)


def _canonical(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _sum(*parts: bytes | memoryview) -> str:
    """The sum of all 64-bit words, the last one of each part filled up with zeros, modulo 2^64."""
    total = np.uint64(0)
    for part in parts:
        whole = len(part) // 8 * 8
        words = np.frombuffer(part, dtype="<u8", count=whole // 8)
        rest = int.from_bytes(bytes(part[whole:]), "little")
        with np.errstate(over="ignore"):
            total += words.sum(dtype=np.uint64) + np.uint64(rest)
    return f"{int(total):016x}"


def _sha256(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
