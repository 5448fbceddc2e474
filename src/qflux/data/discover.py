"""How somebody's data are organised: what `qflux init` finds in a folder.

qflux's own layout      training_images/ and control_images/
a table                 one .csv or .jsonl file, whatever its columns are called
a Hugging Face data set parquet or arrow files, or what `save_to_disk` wrote
two folders             before/ and after/, input/ and output/, … with pictures of the same names; masks/ too
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

GIVEN = ("control", "before", "input", "source", "original", "src", "condition", "conditioning", "in")
WANTED = ("target", "after", "output", "edited", "result", "dst", "out")
SAID = ("instruction", "prompt", "caption", "text")
MASK = ("mask", "masks")
TABLE = ".pairs.jsonl"
"""How tables that `init` writes end; they are not taken for data."""
REMEDY = "see docs/data.md for how data can be organised."


@dataclass(frozen=True)
class Discovered:
    """A source as it stands in a config, and the rows of a table if one has to be written for it."""

    kind: str
    """In words."""
    source: dict[str, Any]
    rows: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was understood how, and what was left aside."""


def discover(path: Path, prompt: str | None = None) -> Discovered:
    """What a folder or file holds; `prompt` is for pairs that have no text of their own."""
    if not path.exists():
        raise DataError(f"there is nothing at {path}", "give the folder or the table of your data.")
    _require_name(path)
    if path.is_file():
        return _file(path)
    if (path / TARGETS).is_dir():
        return Discovered(f"{TARGETS}/ and {CONTROLS}/", {"type": "folder", "path": str(path)})
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _hub(path, _with_suffix(path.rglob("*"), ".arrow"))
    tables = [f for f in _with_suffix(path.iterdir(), ".csv", ".jsonl") if not f.name.endswith(TABLE)]
    if len(tables) > 1:
        names = ", ".join(file.name for file in tables)
        raise DataError(f"{path} holds several tables: {names}", "give the one you mean.")
    if tables:
        return _file(tables[0])
    frames = _with_suffix(path.rglob("*"), ".parquet", ".arrow")
    if frames:
        return _hub(path, frames)
    return _two_folders(path, prompt) or _pairs(path, prompt) or _nothing(path)


def _with_suffix(files: Iterable[Path], *suffixes: str) -> list[Path]:
    return sorted(f for f in files if f.suffix.lower() in suffixes and f.is_file() and not f.name.startswith("."))


def _require_name(path: Path) -> None:
    """Configs and tables are UTF-8; a name that is not can't stand in them."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DataError(f"the name {str(path)!r} is not UTF-8", "rename it.") from None


# Tables and data sets


def _file(path: Path) -> Discovered:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".arrow"):
        return _hub(path, [path])
    if suffix not in (".csv", ".jsonl"):
        raise DataError(f"{path} is neither a folder nor a .csv, .jsonl or .parquet file", REMEDY)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), []) if suffix == ".csv" else _first_keys(file)
    except (UnicodeDecodeError, ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"{path} can't be read: {error}", "save it as UTF-8 CSV or JSON lines.") from None
    columns, note = _columns(path, names, "control")
    return Discovered(
        f"a table, {path.name}", {"type": suffix[1:], "path": str(path), "columns": columns}, notes=[note]
    )


def _first_keys(lines: Iterable[str]) -> list[str]:
    first: Any = next((json.loads(line) for line in lines if line.strip()), {})
    return list(first) if isinstance(first, dict) else []


def _hub(path: Path, frames: Sequence[Path]) -> Discovered:
    try:
        import pyarrow as arrow  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise DataError(f"{path} is a Hugging Face data set", "pip install 'qflux[datasets]' to read it.") from None
    if not frames:
        raise DataError(f"{path} holds no parquet or arrow file", REMEDY)
    try:
        if frames[0].suffix.lower() == ".parquet":
            names = parquet.read_schema(frames[0]).names
        else:
            names = _arrow_names(arrow, frames[0])
    except (OSError, arrow.ArrowInvalid) as error:
        raise DataError(f"{frames[0]} can't be read: {error}", "save it again.") from None
    columns, note = _columns(path, names, "controls")
    source = {"type": "huggingface", "path": str(path), "columns": columns}
    return Discovered("a Hugging Face data set", source, notes=[note])


def _arrow_names(arrow: Any, path: Path) -> list[str]:
    """Of either of Arrow's two formats."""
    with arrow.memory_map(str(path)) as file:
        try:
            return list(arrow.ipc.open_stream(file).schema.names)
        except arrow.ArrowInvalid:
            file.seek(0)
            return list(arrow.ipc.open_file(file).schema.names)


def _columns(path: Path, names: Sequence[str], control: str) -> tuple[dict[str, str], str]:
    """What each column is, and a line that says so."""
    texts = [name for name in names if set(_words(name)) & set(SAID)]
    images = [name for name in names if name not in texts]
    chosen = {
        "prompt": _named(texts, SAID),
        "mask": _named(images, MASK),
        "target": _named(images, WANTED),
        control: _named(images, GIVEN),
    }
    rest = [name for name in images if name not in chosen.values() and "image" in _words(name)]
    for role in ("target", control):  # a plain `image` is the wanted one, unless that has a name of its own
        if chosen[role] is None and rest:
            chosen[role] = rest.pop(0)
    listed = ", ".join(map(repr, names)) or "none"
    for role, what in (("target", "the wanted image"), ("prompt", "the prompt")):
        if chosen[role] is None:
            raise DataError(
                f"{path}: no column looks like {what}; there are {listed}", f"name it for example {role!r}."
            )
    found = {role: name for role, name in chosen.items() if name}
    further = re.compile(rf"{re.escape(found.get(control) or '-')}_\d+")
    unused = [name for name in names if name not in found.values() and not further.fullmatch(name)]
    said = ", ".join(f"{role} is {name!r}" for role, name in found.items())
    return found, f"columns: {said}" + (f"; not used: {', '.join(map(repr, unused))}" if unused else "")


def _words(name: str) -> list[str]:
    """The words of a name: `beforeImage`, `before_image` and `Before image` are the same."""
    return [word for word in re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()) if word]


def _named(names: Sequence[str], words: Iterable[str]) -> str | None:
    """The name that is one of the words, or says one."""
    for word in words:
        exact = next((name for name in names if _words(name) == [word]), None)
        if exact:
            return exact
    for word in words:
        among = next((name for name in names if word in _words(name)), None)
        if among:
            return among
    return None


# Pairs of pictures


def _two_folders(path: Path, prompt: str | None) -> Discovered | None:
    folders = {folder.name: folder for folder in sorted(path.iterdir()) if folder.is_dir()}
    singular = {name.removesuffix("s") if name.lower() != "masks" else name: folder for name, folder in folders.items()}
    given, wanted, mask = (_named(list(singular), words) for words in (GIVEN, WANTED, MASK))
    if given is None or wanted is None or given == wanted:
        return None
    notes: list[str] = []
    before, after = _images(singular[given], notes), _images(singular[wanted], notes)
    masks = _images(singular[mask], notes) if mask else {}
    common = sorted(before.keys() & after.keys())
    if not common:
        raise DataError(
            f"{singular[given]} and {singular[wanted]} have no picture of the same name", "give pairs the same name."
        )
    further = {stem for stem in before if re.fullmatch(r".+_control_\d+", stem)}
    alone = sorted((before.keys() ^ after.keys()) - further)
    _note_alone(alone, notes)
    rows = [_row(path, before, after[stem], stem, masks.get(stem), prompt) for stem in common]
    kind = f"pairs in {singular[given].name}/ and {singular[wanted].name}/"
    return Discovered(kind, {"type": "jsonl"}, rows, notes)


def _pairs(path: Path, prompt: str | None) -> Discovered | None:
    roles: dict[str, dict[str, Path]] = {"given": {}, "wanted": {}, "mask": {}}
    notes: list[str] = []
    for stem, file in _images(path, notes).items():
        found = re.fullmatch(r"(.+)[-_ ]([A-Za-z]+)", stem)
        word = found[2].lower() if found else ""
        role = "given" if word in GIVEN else "wanted" if word in WANTED else "mask" if word in MASK else None
        if found is None or role is None:
            continue
        if found[1] in roles[role]:
            notes.append(f"{file.name} is left aside: {roles[role][found[1]].name} has its place")
        roles[role].setdefault(found[1], file)
    common = sorted(roles["given"].keys() & roles["wanted"].keys())
    if not common:
        return None
    _note_alone(sorted(roles["given"].keys() ^ roles["wanted"].keys()), notes)
    rows = [_row(path, roles["given"], roles["wanted"][stem], stem, roles["mask"].get(stem), prompt) for stem in common]
    return Discovered("pairs in one folder", {"type": "jsonl"}, rows, notes)


def _note_alone(names: Sequence[str], notes: list[str]) -> None:
    if names:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        notes.append(f"{len(names)} pictures have no partner and are left aside: {shown}")


def _row(
    root: Path, given: dict[str, Path], wanted: Path, stem: str, mask: Path | None, prompt: str | None
) -> dict[str, str]:
    row = {"path_control": given[stem], "path_target": wanted}
    number = 1
    while f"{stem}_control_{number}" in given:
        row[f"path_control_{number}"] = given[f"{stem}_control_{number}"]
        number += 1
    if mask:
        row["path_mask"] = mask
    for file in row.values():
        _require_name(file)
    text = _text(wanted) or _text(given[stem]) or prompt
    if not text:
        raise DataError(
            f"{wanted} has no prompt: {wanted.with_suffix('.txt').name} is missing or empty",
            "write one, or give --prompt for all.",
        )
    return {name: str(file.relative_to(root)) for name, file in row.items()} | {"prompt": text}


def _text(image: Path) -> str | None:
    file = image.with_suffix(".txt")
    try:
        return file.read_text(encoding="utf-8-sig").strip() if file.is_file() else None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8", "save it as UTF-8.") from None


def _images(folder: Path, notes: list[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in _with_suffix(folder.iterdir(), *SUFFIXES):
        if file.stem in found:
            notes.append(f"{file} is left aside: {found[file.stem].name} has the same name")
        found.setdefault(file.stem, file)
    return found


def _nothing(path: Path) -> Discovered:
    inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise DataError(f"no data of a known organisation in {path}: it holds {inside}", REMEDY)
