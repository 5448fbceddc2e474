"""Files and folders that are either whole or absent: written under a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reports and lists of files should not wait for torch
    from torch import Tensor


def write_bytes(path: Path, data: bytes, staging: Path | None = None) -> None:
    """`path` appears complete or not at all, even if the machine dies meanwhile.

    It is written in the folder `staging` of the same file system first, by default beside its final place.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():  # a device or a pipe: there is nothing to replace
        path.write_bytes(data)
        return
    try:
        write_chunks(path, [data], staging)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        write_chunks(path, [data])  # a link has led to another disk


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview], staging: Path | None = None) -> None:
    """The same as `write_bytes` for data that comes in pieces."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = (staging or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # a full disk is reported without a file name
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, value: Any, staging: Path | None = None) -> None:
    """Write a value as JSON for people: indented, keys in order."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(), staging)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file tensor by tensor, so that it takes no memory of its own.

    Equal contents give equal bytes.
    """
    import torch  # noqa: PLC0415  (whoever has tensors has loaded it)

    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned, as readers want it
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        dtype = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)

    def content() -> Iterator[bytes | memoryview]:
        yield len(encoded).to_bytes(8, "little") + encoded
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().flatten()
            if flat.numel():
                yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]

    write_chunks(path, content())


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to fill. When the block ends without an error it takes the place of `final`.

    An older `final` is gone only when the new one is in place: killed in between, it lies aside, where
    `restore_folder` finds it.
    """
    staging, aside = final.with_name(f".{final.name}.{os.getpid()}.tmp"), _aside(final)
    sweep(final.parent, final.name)  # a killed attempt may have left as much as a whole transformer
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        shutil.rmtree(aside, ignore_errors=True)
        if final.exists():
            final.rename(aside)
        try:
            staging.rename(final)
        except OSError:
            restore_folder(final)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    sync_folder(final.parent)


def restore_folder(final: Path) -> None:
    """Put back what a kill has left aside while it was being replaced."""
    if not final.exists() and _aside(final).exists():
        _aside(final).rename(final)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes have left of things that were being written: of one name, or all in a folder."""
    for path in folder.glob(".*.tmp"):
        found = re.fullmatch(r"\.(.+)\.(\d+)\.tmp", path.name)
        if found and name in (None, found[1]) and not _is_alive(int(found[2])):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
