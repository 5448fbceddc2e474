"""How somebody's data are organised: what `qflux init` finds in a folder.

qflux's own layout      training_images/ and control_images/
a table                 one .csv or .jsonl file, whatever its columns are called
a Hugging Face data set parquet or arrow files, or what `save_to_disk` wrote
two folders             before/ and after/, input/ and output/, … with pictures of the same names
pairs in one folder     x_before.png and x_after.png, …

The last two have no source of their own: their pairs become a table.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qflux.data.folder import CONTROLS, TARGETS
from qflux.data.images import SUFFIXES
from qflux.errors import DataError

GIVEN = ("control", "before", "input", "source", "original", "src", "condition", "in")
WANTED = ("target", "after", "output", "edited", "result", "dst", "image", "out")
SAID = ("prompt", "instruction", "caption", "text", "edit_prompt")
MASK = ("mask", "path_mask", "mask_path")
REMEDY = "see docs/data.md for how data can be organised."


@dataclass(frozen=True)
class Discovered:
    """A source as it stands in a config, and the rows of a table if one has to be written for it."""

    kind: str
    """In words."""
    source: dict[str, Any]
    rows: list[dict[str, str]] = field(default_factory=list)


def discover(path: Path, prompt: str | None = None) -> Discovered:
    """What a folder or file holds; `prompt` is for pairs that have no text of their own."""
    if not path.exists():
        raise DataError(f"there is nothing at {path}", "give the folder or the table of your data.")
    if path.is_file():
        return _file(path)
    if (path / TARGETS).is_dir():
        return Discovered(f"{TARGETS}/ and {CONTROLS}/", {"type": "folder", "path": str(path)})
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _hub(path, [*path.rglob("*.arrow")])
    tables = sorted(file for file in path.iterdir() if file.suffix.lower() in (".csv", ".jsonl"))
    if len(tables) > 1:
        names = ", ".join(file.name for file in tables)
        raise DataError(f"{path} holds several tables: {names}", "give the one you mean.")
    if tables:
        return _file(tables[0])
    frames = sorted([*path.rglob("*.parquet"), *path.rglob("*.arrow")])
    if frames:
        return _hub(path, frames)
    return _two_folders(path, prompt) or _pairs(path, prompt) or _nothing(path)


def _file(path: Path) -> Discovered:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".arrow"):
        return _hub(path, [path])
    if suffix not in (".csv", ".jsonl"):
        raise DataError(f"{path} is neither a folder nor a .csv, .jsonl or .parquet file", REMEDY)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if suffix == ".csv":
                names = next(csv.reader(file), [])
            else:
                first: Any = next((json.loads(line) for line in file if line.strip()), {})
                names = list(first) if isinstance(first, dict) else []
    except (UnicodeDecodeError, ValueError, csv.Error) as error:
        raise DataError(f"{path} can't be read: {error}", "save it as UTF-8 CSV or JSON lines.") from None
    columns = {
        "target": _column(names, WANTED, path, "the wanted image"),
        "control": _column(names, GIVEN, None, ""),
        "prompt": _column(names, SAID, path, "the prompt"),
        "mask": _column(names, MASK, None, ""),
    }
    found = {key: name for key, name in columns.items() if name}
    return Discovered(f"a table, {path.name}", {"type": suffix[1:], "path": str(path), "columns": found})


def _hub(path: Path, frames: Sequence[Path]) -> Discovered:
    try:
        import pyarrow as arrow  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise DataError(f"{path} is a Hugging Face data set", "pip install 'qflux[datasets]' to read it.") from None
    if not frames:
        raise DataError(f"{path} holds no parquet or arrow file", REMEDY)
    try:
        if frames[0].suffix == ".parquet":
            names = parquet.read_schema(frames[0]).names
        else:
            with arrow.memory_map(str(frames[0])) as file:
                names = arrow.ipc.open_stream(file).schema.names
    except (OSError, arrow.ArrowInvalid) as error:
        raise DataError(f"{frames[0]} can't be read: {error}", "save it again.") from None
    columns = {
        "target": _column(names, WANTED, path, "the wanted image"),
        "controls": _column(names, GIVEN, None, ""),
        "prompt": _column(names, SAID, path, "the prompt"),
        "mask": _column(names, MASK, None, ""),
    }
    found = {key: name for key, name in columns.items() if name}
    return Discovered("a Hugging Face data set", {"type": "huggingface", "path": str(path), "columns": found})


def _column(names: Sequence[str], wanted: Iterable[str], path: Path | None, what: str) -> str | None:
    """The name that says one of the wanted words: as a whole first, then among others."""
    for word in wanted:
        for name in names:
            if name.lower() == word:
                return name
    for word in wanted:
        for name in names:
            if word in re.split(r"[^a-z]+", name.lower()):
                return name
    if path is None:
        return None
    raise DataError(
        f"{path}: no column looks like {what}; there are {', '.join(map(repr, names)) or 'none'}",
        f"name it for example {next(iter(wanted))!r}.",
    )


def _two_folders(path: Path, prompt: str | None) -> Discovered | None:
    folders = {folder.name.lower(): folder for folder in sorted(path.iterdir()) if folder.is_dir()}
    given, wanted = _named(folders, GIVEN), _named(folders, WANTED)
    if given is None or wanted is None or given == wanted:
        return None
    before, after = _images(given), _images(wanted)
    common = sorted(before.keys() & after.keys())
    if not common:
        raise DataError(f"{given} and {wanted} have no picture of the same name", "give pairs the same name.")
    rows = [_row(path, before[stem], after[stem], prompt) for stem in common]
    return Discovered(f"pairs in {given.name}/ and {wanted.name}/", {"type": "jsonl"}, rows)


def _pairs(path: Path, prompt: str | None) -> Discovered | None:
    ends: dict[str, dict[str, Path]] = {}
    for stem, file in _images(path).items():
        found = re.fullmatch(r"(.+)[-_ ]([A-Za-z]+)", stem)
        role = found[2].lower() if found else ""
        if found and role in GIVEN + WANTED:
            ends.setdefault(found[1], {})["given" if role in GIVEN else "wanted"] = file
    pairs = [found for _, found in sorted(ends.items()) if len(found) == 2]
    if not pairs:
        return None
    rows = [_row(path, pair["given"], pair["wanted"], prompt) for pair in pairs]
    return Discovered("pairs in one folder", {"type": "jsonl"}, rows)


def _row(root: Path, given: Path, wanted: Path, prompt: str | None) -> dict[str, str]:
    texts = [file.with_suffix(".txt") for file in (wanted, given)]
    text = next(
        (file.read_text(encoding="utf-8-sig", errors="replace").strip() for file in texts if file.is_file()), prompt
    )
    if not text:
        raise DataError(f"{wanted} has no prompt: there is no {texts[0].name}", "write one, or give --prompt for all.")
    return {"path_control": str(given.relative_to(root)), "path_target": str(wanted.relative_to(root)), "prompt": text}


def _named(folders: dict[str, Path], words: Iterable[str]) -> Path | None:
    for word in words:
        for name, folder in folders.items():
            if word in re.split(r"[^a-z]+", name) or name == f"{word}s":
                return folder
    return None


def _images(folder: Path) -> dict[str, Path]:
    return {f.stem: f for f in sorted(folder.iterdir()) if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")}


def _nothing(path: Path) -> Discovered:
    inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise DataError(f"no data of a known organisation in {path}: it holds {inside}", REMEDY)
