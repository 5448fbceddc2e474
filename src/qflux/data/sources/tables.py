"""Samples listed in a table, one row each: CSV with any separator, JSON lines, or a JSON list."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qflux.config import CsvSource, JsonlSource, TableColumns
from qflux.data.images.decode import ImageFile, shown
from qflux.data.sources.listing import (
    ListedSample,
    Listing,
    current_folder,
    note_controls,
    require_columns,
    told_apart,
)
from qflux.data.sources.naming import numbered
from qflux.data.sources.wording import read_wording
from qflux.errors import DataError

Row = tuple[int, Mapping[str, object]]
"""The number of a row (its line in a file of lines), and its values."""

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
_SEPARATORS = ",;\t|"


@dataclass
class RawTable:
    """The rows of a file as they stand there."""

    path: Path
    columns: list[str]
    rows: list[Row]
    faults: list[tuple[int, str]] = field(default_factory=list)
    """Rows that can't be read, and why."""


def read_rows(path: Path, strict: bool = True) -> RawTable:
    """The rows of a table of any kind; an error if it is none.

    Where a CSV table can't be read from a line on, that is an error too, or if `strict` is false a fault of that line.
    """
    if not path.is_file():
        raise DataError(f"no file {path}{current_folder(path)}", "check the path of the source.")
    try:
        if path.suffix.lower() in (".csv", ".tsv"):
            return _csv(path, strict)
        return _json(path) if path.suffix.lower() == ".json" else _json_lines(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}", "save it as UTF-8.") from None
    except csv.Error as error:
        raise DataError(f"{path} is not a valid CSV table: {error}", "check its quotes, and that it is one.") from None


def read_table(settings: CsvSource | JsonlSource) -> Listing:
    """All samples of a table in its order, and what is wrong with the others."""
    table = read_rows(settings.path)
    listing = Listing(shown(settings.path))
    for number, problem in table.faults:
        listing.fault(_place(settings.path, number), problem)
    if table.columns:
        needed = ("target", "prompt", *(("controls",) if settings.columns.controls else ()))
        require_columns(shown(settings.path), table.columns, settings.columns, needed)
    root = settings.root or settings.path.parent
    for number, values in table.rows:
        sample = _sample(_place(settings.path, number), values, root, settings.columns, listing)
        if sample is not None:
            listing.samples.append(sample)
    listing.samples = told_apart(listing.samples)
    note_controls(listing)
    return listing


def _place(path: Path, line: int) -> str:
    """A row in messages; two tables often have one name."""
    return shown(f"{path.parent.name}/{path.name}:{line}" if path.parent.name else f"{path.name}:{line}")


def _csv(path: Path, strict: bool) -> RawTable:
    csv.field_size_limit(1 << 24)
    separator = _separator(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, delimiter=separator)
        table = RawTable(path, list(reader.fieldnames or []), [])
        twice = sorted({name for name in table.columns if table.columns.count(name) > 1})
        if twice:
            raise DataError(f"{path} has the column {twice[0]!r} twice", "rename one of them.")
        start = reader.line_num + 1
        try:
            for row in reader:
                if None in row:
                    mark = {",": "comma", ";": "semicolon", "\t": "tab"}.get(separator, separator)
                    problem = f"more values than columns ({row[None]!r}); a text with a {mark} needs quotes"
                    table.faults.append((start, problem))
                else:
                    table.rows.append((start, row))
                start = reader.line_num + 1
        except csv.Error as error:
            if strict:
                raise
            table.faults.append((start, f"from here on the table can't be read: {error}"))
    return table


def _separator(path: Path) -> str:
    """Whatever splits the header into the most names; a comma if nothing does."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline()
    return max(_SEPARATORS, key=lambda mark: (len(next(csv.reader([header], delimiter=mark), [])), mark == ","))


def _json_lines(path: Path) -> RawTable:
    table = RawTable(path, [], [])
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                _add(table, number, json.loads(line))
            except (ValueError, RecursionError) as error:
                table.faults.append((number, f"not valid JSON: {error}"))
    table.columns = sorted({key for _, values in table.rows for key in values})
    return table


def _json(path: Path) -> RawTable:
    """A JSON list of objects, which may stand in an object under any name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}", "save it again.") from None
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DataError(f"{path} holds no list of samples", "a JSON table is a list of objects.")
    table = RawTable(path, [], [])
    for number, item in enumerate(value, start=1):
        _add(table, number, item)
    table.columns = sorted({key for _, values in table.rows for key in values})
    return table


def _add(table: RawTable, number: int, value: Any) -> None:
    if isinstance(value, dict):
        table.rows.append((number, value))
    else:
        table.faults.append((number, f"a {type(value).__name__}, not an object with fields"))


def _sample(
    place: str, values: Mapping[str, object], root: Path, columns: TableColumns, listing: Listing
) -> ListedSample | None:
    """One row as a sample; an absent value is an empty string, a missing field or null."""
    fields = {key: value for key, value in values.items() if value not in (None, "", [])}
    for key in (columns.target, columns.mask):
        if not isinstance(fields.get(key, ""), str):
            listing.fault(place, f"{key} is {fields[key]!r}, not text")
            return None
    if columns.target not in fields:
        listing.fault(place, f"{columns.target} is empty")
        return None
    wording = read_wording(fields, columns, place, listing)
    if wording is None:
        return None
    try:
        controls = tuple(ImageFile(root / path) for path in _controls(fields, columns))
    except ValueError as error:
        listing.fault(place, str(error))
        return None
    target = root / str(fields[columns.target])
    mask = ImageFile(root / str(fields[columns.mask])) if columns.mask in fields else None
    name = shown(os.path.relpath(target, root))
    return wording.put_into(ListedSample(name, ImageFile(target), wording.prompt, controls, mask, place=place))


def _controls(fields: Mapping[str, object], columns: TableColumns) -> Iterator[str]:
    """The paths of a row's control images, the image to edit first; a `ValueError` says what is wrong with them."""
    if columns.controls:
        keys: dict[int, str] = dict(enumerate(columns.controls))
    else:
        keys = {number: key for key in fields if (number := numbered(key, columns.control))} | {0: columns.control}
    found = {number: fields[key] for number, key in sorted(keys.items()) if key in fields}
    last = max(found, default=0)
    for number in range(last + 1):
        name = keys.get(number, f"{columns.control}_{number}")
        if found and number not in found:
            raise ValueError(f"{name} is empty, but {keys[last]} is not")
        value = found.get(number, [])
        paths = [value] if isinstance(value, str) else value
        if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
            raise ValueError(f"{name} is {value!r}, not text")
        yield from paths
