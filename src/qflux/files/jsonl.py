"""Files of one JSON object per line, which a run appends to and a kill may tear."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qflux.files.atomic import write_bytes


def append_line(path: Path, value: Any) -> None:
    """Add a line of JSON to a file; a full disk is reported with the file's name."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; what is torn, as a kill can leave it, or no object is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    yield from _objects(text.splitlines())


class GrowingLines:
    """The objects of a file that somebody adds lines to: what was read before is not read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read_to = 0
        self._end = b""
        """The last bytes of what was read, by which the file is known again."""
        self._found: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """What `read_lines` gives of the file as it is now."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    return self._read(file)
            except FileNotFoundError:
                self._forget()
                return []

    def _read(self, file: BinaryIO) -> list[dict[str, Any]]:
        file.seek(self._read_to - len(self._end))
        if file.read(len(self._end)) != self._end:  # another file is there, as a run that is resumed writes one
            self._forget()
            file.seek(0)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # behind it is a line that is being written
        self._found += _objects(whole.decode(errors="replace").splitlines())
        self._read_to += len(whole)
        self._end = (self._end + whole)[-256:]
        return [*self._found, *_objects(data[len(whole) :].decode(errors="replace").splitlines())]

    def _forget(self) -> None:
        self._read_to, self._end, self._found = 0, b"", []


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool], head: list[dict[str, Any]] | None = None) -> None:
    """Write a file anew with the lines that are to stay, behind those of `head`."""
    kept = [*(head or []), *filter(is_kept, read_lines(path))]
    write_bytes(path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def finite(value: Any) -> Any:
    """The same with text for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
