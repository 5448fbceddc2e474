"""Samples listed in a CSV or JSONL file: paths and prompts, one row each."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from qflux.config import CsvSource, JsonlSource, TableColumns
from qflux.data.examples import EditExample, Listing
from qflux.data.images import ImageFile, shown
from qflux.errors import DataError

Row = tuple[int, Mapping[str, object]]
"""The number of a row's line in the file, and its values."""


def read_table(settings: CsvSource | JsonlSource) -> Listing:
    """All samples of a table in its order, and what is wrong with the others."""
    path = settings.path
    if not path.is_file():
        raise DataError(f"no file {path}", "check the path of the source.")
    listing = Listing(shown(path))
    try:
        rows = list(_csv_rows(path) if isinstance(settings, CsvSource) else _json_rows(path, listing))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} can't be read: {error}", "save it as UTF-8 text.") from None
    _require_columns(path, rows, settings.columns)
    root = settings.root or path.parent
    for line, values in rows:
        example = _example(f"{path.name}:{line}", values, root, settings.columns, listing)
        if example is not None:
            listing.examples.append(example)
    return listing


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        for row in reader:
            yield reader.line_num, {key: value for key, value in row.items() if key is not None}


def _json_rows(path: Path, listing: Listing) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                listing.fault(f"{path.name}:{number}", f"not valid JSON: {error}")
                continue
            if isinstance(value, dict):
                yield number, value
            else:
                listing.fault(f"{path.name}:{number}", f"a {type(value).__name__}, not an object with fields")


def _require_columns(path: Path, rows: list[Row], columns: TableColumns) -> None:
    present = sorted({key for _, values in rows for key in values})
    for role in ("target", "prompt"):
        name = getattr(columns, role)
        if rows and name not in present:
            near = difflib.get_close_matches(name, present, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(present)}."
            raise DataError(f"{path} has no column {name!r}", f"{hint} Set columns.{role} of the source to map it.")


def _example(
    name: str, values: Mapping[str, object], root: Path, columns: TableColumns, listing: Listing
) -> EditExample | None:
    """One row as a sample; an absent value is an empty string, a missing field or null."""
    fields = {key: value for key, value in values.items() if value not in (None, "")}
    wrong = [
        key for key in fields if not isinstance(fields[key], str) and (key in _plain(columns) or _number(key, columns))
    ]
    if wrong:
        listing.fault(name, f"{wrong[0]} is {fields[wrong[0]]!r}, not text")
        return None

    def image(key: str) -> ImageFile:
        return ImageFile(root / str(fields[key]))

    if columns.target not in fields:
        listing.fault(name, f"{columns.target} is empty")
        return None
    prompt = str(fields.get(columns.prompt, "")).strip()
    if not prompt:
        listing.fault(name, f"{columns.prompt} is empty")
        return None
    numbered = {number: key for key in fields if (number := _number(key, columns))}
    if columns.control in fields:
        numbered[0] = columns.control
    gap = next((n for n in range(len(numbered)) if n not in numbered), None)
    if gap is not None:
        missing = f"{columns.control}_{gap}" if gap else columns.control
        listing.fault(name, f"{missing} is empty, but {numbered[max(numbered)]} is not")
        return None
    controls = tuple(image(numbered[number]) for number in sorted(numbered))
    mask = image(columns.mask) if columns.mask in fields else None
    return EditExample(name, image(columns.target), prompt, controls, mask)


def _plain(columns: TableColumns) -> tuple[str, ...]:
    return columns.target, columns.control, columns.prompt, columns.mask


def _number(key: str, columns: TableColumns) -> int | None:
    """The number of a further control's column, if it is one."""
    match = re.fullmatch(re.escape(columns.control) + r"_([1-9]\d*)", key)
    return int(match[1]) if match else None
