"""Lists of edits to make: a folder, a CSV or a JSONL file.

folder   `<name>.png` with `<name>.txt`, further images `<name>_control_1.png` …
table    columns (or JSON keys) `image`, `image_1` …, `prompt`, and if wanted `name`, `prompt_2`, `negative_prompt`,
         `seed`, `height`, `width`; JSON may have a list `images` instead. Paths are relative to the file.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qflux.data.images import SUFFIXES
from qflux.errors import DataError

COLUMNS = ("image", "images", "prompt", "name", "prompt_2", "negative_prompt", "seed", "height", "width")


SHEET = "contact_sheet"
"""The name of the picture that shows them all; no job may have it."""


@dataclass(frozen=True)
class Job:
    """One edit of a list: images by path, and what to do with them."""

    name: str
    images: tuple[Path, ...]
    prompt: str
    prompt_2: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    size: tuple[int, int] | None = None
    """`(height, width)`"""


@dataclass(frozen=True)
class JobList:
    """Jobs in the order of the list, and what is wrong with the others."""

    jobs: list[Job]
    problems: list[str]


def read_jobs(path: Path, prompt: str | None = None) -> JobList:
    """The jobs of a folder or a file; `prompt` is for those that have none of their own."""
    if path.is_dir():
        rows = _folder(path)
    elif path.suffix.lower() == ".csv":
        rows = _csv(path)
    elif path.suffix.lower() in (".jsonl", ".ndjson"):
        rows = _jsonl(path)
    else:
        raise DataError(f"--jobs {path} is neither a folder nor a .csv or .jsonl file", "give one of these.")
    jobs, problems = [], []
    for place, row in rows:
        try:
            jobs.append(_job(row, path if path.is_dir() else path.parent, prompt))
        except DataError as error:
            problems.append(f"{place}: {error.problem}")
    twice = {name for name, count in Counter(job.name for job in jobs).items() if count > 1}
    problems += [f"{name}: several jobs have this name; give each one in a column `name`" for name in sorted(twice)]
    kept = [job for job in jobs if job.name not in twice]
    if not kept and not problems:
        raise DataError(f"--jobs {path} holds no job", "a folder needs images, a table needs rows.")
    return JobList(kept, problems)


def _job(row: Mapping[str, Any], root: Path, default: str | None) -> Job:
    images = tuple(root / Path(value).expanduser() for value in _images(row))
    prompt = _text(row, "prompt") or default
    if prompt is None:
        raise DataError("it has no prompt")
    missing = [image for image in images if not image.is_file()]
    if missing:
        raise DataError(f"there is no file {missing[0]}")
    height, width = _whole(row, "height"), _whole(row, "width")
    if (height is None) != (width is None):
        raise DataError("height and width go together")
    name = _text(row, "name") or (images[0].stem if images else re.sub(r"\W+", "-", prompt)[:60].strip("-"))
    if not name or "/" in name or name.startswith(".") or name == SHEET:
        raise DataError(f"{name!r} can't be the name of an image")
    return Job(
        name=name,
        images=images,
        prompt=prompt,
        prompt_2=_text(row, "prompt_2"),
        negative_prompt=_text(row, "negative_prompt", empty=True),
        seed=_whole(row, "seed"),
        size=None if height is None or width is None else (height, width),
    )


def _images(row: Mapping[str, Any]) -> list[str]:
    listed = row.get("images")
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise DataError(f"images is {listed!r}, not a list of paths")
        return listed
    numbered = sorted((int(k[6:]), k) for k in row if re.fullmatch(r"image_\d+", k) and row[k] not in (None, ""))
    keys = [*(["image"] if row.get("image") else []), *(key for _, key in numbered)]
    return [str(row[key]) for key in keys]


def _text(row: Mapping[str, Any], key: str, empty: bool = False) -> str | None:
    value = row.get(key)
    if value is None or (value == "" and not empty):
        return None
    if not isinstance(value, str):
        raise DataError(f"{key} is {value!r}, not a text")
    return value


def _whole(row: Mapping[str, Any], key: str) -> int | None:
    value = row.get(key)
    if value is None or value == "":
        return None
    try:
        number = int(str(value))
    except ValueError:
        raise DataError(f"{key} is {value!r}, not a whole number") from None
    if not 0 <= number < 2**63:
        raise DataError(f"{key} is {number}, which is out of range")
    return number


def _folder(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    images = {
        f.stem: f for f in sorted(folder.iterdir()) if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")
    }
    for stem, image in images.items():
        if re.fullmatch(r"(.+)_control_\d+", stem) or stem.removesuffix("_mask") in images.keys() - {stem}:
            continue
        row: dict[str, Any] = {"name": stem, "image": image.name}
        number = 1
        while f"{stem}_control_{number}" in images:
            row[f"image_{number}"] = images[f"{stem}_control_{number}"].name
            number += 1
        text = image.with_suffix(".txt")
        if text.is_file():
            row["prompt"] = text.read_text(encoding="utf-8", errors="replace").strip()
        yield image.name, row


def _csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = _content(path)
    reader = csv.DictReader(text.splitlines(), restkey="")
    _require_known(path, reader.fieldnames or [])
    for row in reader:
        yield f"line {reader.line_num}", {key: value for key, value in row.items() if key and value is not None}


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_content(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            yield f"line {number}", {"prompt": [f"no JSON: {error}"]}
            continue
        if not isinstance(row, dict):
            yield f"line {number}", {"prompt": [f"no JSON object: {line[:40]}"]}
            continue
        _require_known(path, row)
        yield f"line {number}", row


def _require_known(path: Path, columns: Any) -> None:
    unknown = [str(c) for c in columns if c not in COLUMNS and not re.fullmatch(r"image_\d+", str(c))]
    if unknown:
        raise DataError(
            f"{path} has a column {unknown[0]!r} that means nothing here", f"known: {', '.join(COLUMNS)}, image_1, …"
        )


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"--jobs: there is no {path}", "check the path.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}", "save it as UTF-8.") from None
