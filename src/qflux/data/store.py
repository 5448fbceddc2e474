"""Files that are either whole or absent: written to a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor


def write_bytes(path: Path, data: bytes, staging: Path | None = None) -> None:
    """`path` appears complete or not at all, even if the machine dies meanwhile.

    It is written in the folder `staging` of the same file system first, by default beside its final place.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():  # a device or a pipe: there is nothing to replace
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = (staging or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno == errno.EXDEV:  # a link has led to another disk
            write_bytes(path, data)
            return
        # a full disk is reported without a file name
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, value: Any, staging: Path | None = None) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(), staging)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file. Equal contents give equal bytes."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, _canonical(save(contiguous, {"format": "pt", **(metadata or {})})))


def _canonical(data: bytes) -> bytes:
    """The library writes metadata in random order; here the header is sorted. Tensor offsets do not depend on it."""
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seed_of(*parts: Any) -> int:
    """A seed for a random generator; equal parts give equal seeds on every machine."""
    return int(key_of(*parts)[:15], 16)


def key_of(*parts: Any) -> str:
    """A hash of JSON values; equal parts give equal keys on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
