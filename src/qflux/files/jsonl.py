"""Files of one JSON object per line, which a run appends to and a kill may tear."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    for line in text.splitlines():
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
