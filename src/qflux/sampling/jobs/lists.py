"""Lists of edits to make: a folder, a CSV or a JSONL file.

folder   `<name>.png` with `<name>.txt`, further images `<name>_control_1.png` …
table    columns (or JSON keys) `image`, `image_1` …, `prompt`, and if wanted `name`, `prompt_2`, `negative_prompt`,
         `seed`, `height` and `width`, or `size` (HEIGHTxWIDTH or input); JSON may have a list `images` instead.
         For --compare, `wanted` (what the result should be) and `mask` (where it may differ).
         Paths are relative to the file.

In a folder they are `<name>_wanted.png` and `<name>_mask.png`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qflux.config.sampling import PredictSettings
from qflux.data.images.decode import SUFFIXES
from qflux.data.images.sizes import AskedSize, asked_size
from qflux.data.sources.naming import further_control, masked_base
from qflux.data.sources.tables import read_rows
from qflux.data.sources.wording import is_text
from qflux.errors import DataError

COLUMNS = ("image", "images", "prompt", "name", "prompt_2", "negative_prompt", "seed", "size", "height", "width")
COMPARED = ("wanted", "mask")
"""Columns with images that results are compared with."""


SHEET = "contact_sheet"
"""The name of the picture that shows them all; no job may have it."""
MOST_NAME = 200
"""Bytes of a name; file systems take 255, and it gets a suffix while it is written."""
_KNOWN = f"known: {', '.join((*COLUMNS, *COMPARED))}, image_1, …"


@dataclass(frozen=True)
class Job:
    """One edit of a list: images by path, and what to do with them."""

    name: str
    images: tuple[Path, ...]
    prompt: str
    prompt_2: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    size: AskedSize = None
    wanted: Path | None = None
    """What the result should be; it is compared with that if asked for."""
    mask: Path | None = None
    """Where the result may differ from the image to edit."""


@dataclass(frozen=True)
class JobList:
    """Jobs in the order of the list, and what is wrong with the others."""

    jobs: list[Job]
    problems: list[str]


Row = tuple[str, dict[str, Any] | DataError]
"""Where it is, and what it says or what is wrong with it."""


def read_jobs(path: Path, prompt: str | None = None) -> JobList:
    """The jobs of a folder or a file; `prompt` is for those that have none of their own."""
    if path.is_dir():
        rows = _folder(path)
    elif path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".ndjson"):
        rows = _table(path)
    else:
        raise DataError(f"--jobs {path} is neither a folder nor a .csv or .jsonl file", "give one of these.")
    listed = _listed(rows, path if path.is_dir() else path.parent, prompt)
    if not listed.jobs and not listed.problems:
        raise DataError(f"--jobs {path} holds no job", "a folder needs images, a table needs rows.")
    return listed


def jobs_of(settings: PredictSettings) -> JobList:
    """The edits that a config names: a prompt for each image, or one prompt or one image for all."""
    prompts, images = list(settings.prompts), [list(map(str, paths)) for paths in settings.images]
    if len(prompts) == 1:
        prompts *= max(1, len(images))
    if len(images) == 1:
        images *= len(prompts)
    if images and len(images) != len(prompts):
        raise DataError(
            f"predict has {len(prompts)} prompts and images for {len(images)}", "give images for each, or for all."
        )
    width = len(str(len(prompts)))
    rows: list[Row] = []
    for number, prompt in enumerate(prompts):
        given = images[number] if images else []
        stem = Path(given[0]).stem if given else "edit"
        row = {"prompt": prompt, "images": given, "name": f"{number + 1:0{width}}-{stem}"}
        rows.append((f"predict.prompts[{number}]", row))
    return _listed(rows, Path(), None)


def _listed(rows: Iterable[Row], root: Path, prompt: str | None) -> JobList:
    jobs, problems = [], []
    for place, row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            jobs.append(_job(row, root, prompt))
        except DataError as error:
            name = row.get("name") if isinstance(row, dict) else None
            problems.append(f"{_called(name, place)}: {error.problem}")
    twice = {name for name, count in Counter(job.name for job in jobs).items() if count > 1}
    problems += [
        f"{job.name}: several jobs have this name; give each one in a column `name`"
        for job in jobs
        if job.name in twice
    ]
    return JobList([job for job in jobs if job.name not in twice], problems)


def _called(name: Any, place: str) -> str:
    """A job by its name, if it has one, and by its place."""
    if not isinstance(name, str) or not name or name in place:
        return place
    return f"{name if len(name) <= 40 else name[:40] + '…'} ({place})"


def require_text(value: str | None, what: str) -> None:
    """Text that files and tokenizers can hold: no lone halves of characters, no NUL."""
    if value is not None and ("\0" in value or not is_text(value)):
        raise DataError(f"{what} holds characters that are not Unicode: {value[:60]!r}", "save it as UTF-8.")


def _job(row: Mapping[str, Any], root: Path, default: str | None) -> Job:
    images = tuple(_existing(root, value) for value in _images(row))
    prompt = _text(row, "prompt") or default
    if prompt is None or not (prompt.strip() or default is not None):
        raise DataError("it has no prompt")
    name = _text(row, "name") or (images[0].stem if images else re.sub(r"\W+", "-", prompt)[:60].strip("-"))
    if not name or "/" in name or name.startswith(".") or name == SHEET or not name.isprintable():
        raise DataError(f"{name[:80]!r} can't be the name of an image")
    if len(name.encode()) > MOST_NAME:
        raise DataError(f"the name {name[:40]}… has {len(name.encode())} bytes, {MOST_NAME} are possible")
    return Job(
        name=name,
        images=images,
        prompt=prompt,
        prompt_2=_text(row, "prompt_2"),
        negative_prompt=_text(row, "negative_prompt", empty=True),
        seed=_whole(row, "seed"),
        size=_size(row),
        **{key: _existing(root, path) for key in COMPARED if (path := _text(row, key))},
    )


def _size(row: Mapping[str, Any]) -> AskedSize:
    height, width, text = _whole(row, "height"), _whole(row, "width"), _text(row, "size")
    if (height is None) != (width is None):
        raise DataError("height and width go together")
    if text is not None and height is not None:
        raise DataError("size and height exclude each other")
    if text is not None:
        return asked_size(text)
    return None if height is None or width is None else (height, width)


def _existing(root: Path, value: str) -> Path:
    require_text(value, "a path")
    try:
        path = root / Path(value).expanduser()
        if path.is_file():
            return path
    except OSError as error:
        raise DataError(f"{value[:80]} can't be opened: {error.strerror}") from None
    except RuntimeError as error:
        raise DataError(f"{value[:80]} can't be opened: {error}") from None
    raise DataError(f"there is no file {path}")


def _images(row: Mapping[str, Any]) -> list[str]:
    listed = row.get("images")
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise DataError(f"images is {listed!r}, not a list of paths")
        return listed
    further = sorted((n, k) for k in row if (n := _number(k)) is not None and row[k] not in (None, ""))
    keys = [*(["image"] if row.get("image") else []), *(key for _, key in further)]
    return [str(row[key]) for key in keys]


def _text(row: Mapping[str, Any], key: str, empty: bool = False) -> str | None:
    value = row.get(key)
    if value is None or (value == "" and not empty):
        return None
    if not isinstance(value, str):
        raise DataError(f"{key} is {value!r}, not a text")
    require_text(value, key)
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


def _folder(folder: Path) -> Iterator[Row]:
    images: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
            images.setdefault(file.stem, []).append(file)
    for stem, files in images.items():
        image = files[0]
        further = further_control(stem)
        if further:
            base, number = further
            before = base if number == 1 else f"{base}_control_{number - 1}"
            if before not in images:
                yield image.name, DataError(f"it is a further image of {before}, which is not there")
            continue
        if masked_base(stem, images) or _wanted_of(stem, images):
            continue
        if len(files) > 1:
            yield image.name, DataError(f"{' and '.join(file.name for file in files)} would both be {stem}.png")
            continue
        row: dict[str, Any] = {"name": stem, "image": image.name}
        number = 1
        while f"{stem}_control_{number}" in images:
            row[f"image_{number}"] = images[f"{stem}_control_{number}"][0].name
            number += 1
        for key in COMPARED:
            if f"{stem}_{key}" in images:
                row[key] = images[f"{stem}_{key}"][0].name
        text = image.with_suffix(".txt")
        try:
            if text.is_file():
                row["prompt"] = text.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError:
            yield image.name, DataError(f"{text.name} is not UTF-8")
            continue
        yield image.name, row


def _wanted_of(stem: str, stems: Container[str]) -> bool:
    """It is what another image of the folder should become."""
    base = stem.removesuffix("_wanted")
    return base != stem and base in stems


def _table(path: Path) -> Iterator[Row]:
    """The rows of a table in its order, those that can't be read among them."""
    table = read_rows(path, strict=False)
    is_csv = path.suffix.lower() in (".csv", ".tsv")
    unknown = _unknown(table.columns) if is_csv else None
    if unknown:
        raise DataError(f"{path} has a column {unknown!r} that means nothing here", _KNOWN)
    found: dict[int, dict[str, Any] | DataError] = {number: DataError(problem) for number, problem in table.faults}
    for number, values in table.rows:
        row = {key: value for key, value in values.items() if value} if is_csv else dict(values)
        odd = _unknown(row)
        found[number] = DataError(f"the key {odd!r} means nothing here; {_KNOWN}") if odd else row
    for number, content in sorted(found.items()):
        named = dict(table.rows).get(number, {}).get("name") if isinstance(content, DataError) else None
        yield _called(named, f"line {number}"), content


def _unknown(columns: Iterable[str]) -> str | None:
    known = (*COLUMNS, *COMPARED)
    return next((str(c) for c in columns if c not in known and _number(str(c)) is None), None)


def _number(column: str) -> int | None:
    """Of `image_0`, `image_1`, …: wherever somebody begins to count."""
    found = re.fullmatch(r"image_(\d{1,9})", column)
    return int(found[1]) if found else None
