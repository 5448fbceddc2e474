"""Files that are either whole or absent: written to a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


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
    """The same for data that comes in pieces."""
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


def append_line(path: Path, value: Any) -> None:
    """Add a line of JSON to a file; a full disk is reported with the file's name."""
    try:
        with path.open("a") as file:
            file.write(json.dumps(value) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; what is torn, as a kill can leave it, or no object is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes have left of files that were being written; of one file, or of all in a folder."""
    for file in folder.glob(".*.tmp"):
        found = re.fullmatch(r"\.(.+)\.(\d+)\.tmp", file.name)
        if found and name in (None, found[1]) and not _is_alive(int(found[2])):
            file.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_json(path: Path, value: Any, staging: Path | None = None) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(), staging)


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
