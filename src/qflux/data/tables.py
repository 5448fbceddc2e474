"""Samples listed in a CSV or JSONL file: paths and prompts, one row each."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qflux.config import CsvSource, JsonlSource, Section, TableColumns
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
        columns, rows = _csv(path, listing) if isinstance(settings, CsvSource) else _jsonl(path, listing)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}", "save it as UTF-8.") from None
    except csv.Error as error:
        raise DataError(f"{path} is not a valid CSV table: {error}", "check its quotes, and that it is one.") from None
    if columns:
        require_columns(shown(path), columns, settings.columns, ("target", "prompt"))
    root = settings.root or path.parent
    for line, values in rows:
        example = _example(_place(path, line), values, root, settings.columns, listing)
        if example is not None:
            listing.examples.append(example)
    note_controls(listing)
    return listing


def require_columns(name: str, present: Sequence[str], columns: Section, needed: Sequence[str]) -> None:
    """An error for a column that is needed, or was asked for, or is there under almost its name."""
    for role, column in columns:
        if column in present:
            continue
        near = difflib.get_close_matches(str(column), present, n=1, cutoff=0.85)
        taken = {getattr(columns, other) for other in type(columns).model_fields}
        suspect = near and near[0] not in taken
        if role in needed or role in columns.model_fields_set or suspect:
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(present)}."
            raise DataError(f"{name} has no column {column!r}", f"{hint} Set columns.{role} of the source to map it.")


def is_text(value: str) -> bool:
    """It can be written as UTF-8; JSON can say things that can't."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def note_controls(listing: Listing) -> None:
    """Say how many samples have no control image, if some or all have none."""
    without = [example.name for example in listing.examples if not example.controls]
    if without:
        names = ", ".join(without[:10])
        listing.notes.append(f"{len(without)} of {len(listing.examples)} samples have no control image: {names}")


def _place(path: Path, line: int) -> str:
    """A row in messages; two tables often have one name."""
    return shown(f"{path.parent.name}/{path.name}:{line}")


def _csv(path: Path, listing: Listing) -> tuple[list[str], list[Row]]:
    rows: list[Row] = []
    csv.field_size_limit(1 << 24)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        columns = list(reader.fieldnames or [])
        if len(columns) == 1 and (separator := next((c for c in ";\t|" if c in columns[0]), None)):
            raise DataError(f"{path}: its values are separated by {separator!r}", "save it with commas between values.")
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise DataError(f"{path} has the column {twice[0]!r} twice", "rename one of them.")
        start = reader.line_num + 1
        for row in reader:
            if None in row:
                extra = row[None]
                problem = f"more values than columns ({extra!r}); a text with a comma needs quotes"
                listing.fault(_place(path, start), problem)
            else:
                rows.append((start, row))
            start = reader.line_num + 1
    return columns, rows


def _jsonl(path: Path, listing: Listing) -> tuple[list[str], list[Row]]:
    rows = list(_json_rows(path, listing))
    return sorted({key for _, values in rows for key in values}), rows


def _json_rows(path: Path, listing: Listing) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                listing.fault(_place(path, number), f"not valid JSON: {error}")
                continue
            if isinstance(value, dict):
                yield number, value
            else:
                listing.fault(_place(path, number), f"a {type(value).__name__}, not an object with fields")


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
    if not is_text(prompt):
        listing.fault(name, f"{columns.prompt} holds half a character (a lone surrogate)")
        return None
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
    match = re.fullmatch(re.escape(columns.control) + r"_([1-9]\d{0,3})", key)
    return int(match[1]) if match else None
