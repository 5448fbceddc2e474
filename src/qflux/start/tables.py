"""Which column of a table or a data set is what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qflux.data.images.decode import SUFFIXES
from qflux.data.sources.tables import RawTable, read_rows
from qflux.errors import DataError
from qflux.start.folder import DOCS, Discovered, Wish
from qflux.start.words import WORDS, Role, part_of, words

TABULAR = frozenset({".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow"})
_ROLES = ("target", "control", "controls", "prompt", "mask")
_PICTURE = frozenset({"image", "img", "picture", "photo", "file", "path"})


def table(path: Path, wish: Wish) -> Discovered:
    """A table of paths and prompts. One that has no prompts is written anew with the one somebody gives."""
    if path.suffix.lower() in (".parquet", ".arrow"):
        return data_set(path, [path], wish)
    found = read_rows(path)
    kind = "csv" if path.suffix.lower() in (".csv", ".tsv") else "jsonl"
    columns = _columns(path, _picture_columns(found), found.columns, wish)
    notes = [_said(columns, found.columns)]
    if "prompt" not in columns and wish.prompt is None:
        raise _missing(path, found.columns, "the prompt", "prompt", ", or give one for all with --prompt")
    if wish.prompt is not None and ("prompt" not in columns or _lacks_prompts(found, columns["prompt"])):
        notes += [f"{path.name}:{number} can't be read: {problem}" for number, problem in found.faults]
        rows = list(_with_prompt(found, columns, wish.prompt))
        return Discovered(f"a table, {path.name}", {"type": "jsonl", "root": str(path.parent)}, rows, notes)
    controls = columns.pop("controls")
    if isinstance(controls, list) and controls:
        columns["control" if len(controls) == 1 else "controls"] = controls[0] if len(controls) == 1 else controls
    return Discovered(f"a table, {path.name}", {"type": kind, "path": str(path), "columns": columns}, notes=notes)


def data_set(path: Path, frames: Sequence[Path], wish: Wish) -> Discovered:
    """A Hugging Face data set on this machine."""
    try:
        import pyarrow as arrow  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise DataError(f"{path} is a Hugging Face data set", "pip install 'qflux[datasets]' to read it.") from None
    if not frames:
        raise DataError(f"{path} holds no parquet or arrow file", DOCS)
    try:
        if frames[0].suffix.lower() == ".parquet":
            names = parquet.read_schema(frames[0]).names
        else:
            names = _arrow_names(arrow, frames[0])
    except (OSError, arrow.ArrowInvalid) as error:
        raise DataError(f"{frames[0]} can't be read: {error}", "save it again.") from None
    columns = _columns(path, names, names, wish)
    note = _said(columns, names)
    if "prompt" not in columns:
        raise _missing(path, names, "the prompt", "prompt")
    if not columns["controls"]:
        del columns["controls"]
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


def _picture_columns(table: RawTable) -> list[str]:
    """The columns that hold paths of pictures; all of them if none looks like it."""
    found = []
    for name in table.columns:
        values = [values.get(name) for _, values in table.rows[:50]]
        listed = [item for value in values for item in (value if isinstance(value, list) else [value])]
        if any(isinstance(item, str) and Path(item).suffix.lower() in SUFFIXES for item in listed):
            found.append(name)
    return found or list(table.columns)


def _columns(path: Path, images: Sequence[str], names: Sequence[str], wish: Wish) -> dict[str, Any]:
    """Roles and the columns that have them; `controls` is always a list, the image to edit first.

    `images` are the columns that may hold pictures.
    """
    found: dict[str, Any] = _asked(path, names, wish)
    taken = [name for value in found.values() for name in ([value] if isinstance(value, str) else value)]
    free = [name for name in names if name not in taken]
    texts = [name for name in free if set(words(name)) & set(WORDS["text"])]
    pictures = [name for name in free if name in images and name not in texts]
    _take(found, "prompt", min(texts, key=_instructs, default=None))
    _take(found, "mask", _named(pictures, "mask"))
    _take(found, "target", _named(pictures, "wanted"))
    pictures = [name for name in pictures if name not in found.values()]
    rest = [name for name in pictures if part_of(name) is None and set(words(name)) & _PICTURE]
    if "controls" not in found:
        first = _named(pictures, "given")
        if first is None and rest and "target" in found:
            first = rest.pop(0)  # a plain `image` beside the wanted one is the one to edit
        numbered = [name for name in pictures if first and re.fullmatch(rf"{re.escape(first)}_\d+", name)]
        others = [name for name in pictures if (part := part_of(name)) and part.role in ("given", "reference")]
        similar = [name for name in others if first and _without_number(name) == _without_number(first)]
        found["controls"] = list(dict.fromkeys([first, *sorted({*numbered, *similar}, key=_number)])) if first else []
        found["controls"] += [n for n in others if n not in found["controls"] and part_of(n).role == "reference"]  # type: ignore[union-attr]
    if "target" not in found and rest:
        found["target"] = rest.pop(0)  # a plain `image` is the wanted one, unless that has a name of its own
    if "target" not in found:
        raise _missing(path, names, "the wanted image", "target")
    return found


def _asked(path: Path, names: Sequence[str], wish: Wish) -> dict[str, Any]:
    """The columns that somebody has named."""
    found: dict[str, Any] = {}
    given = dict(wish.columns)
    given |= {"target": wish.target} if wish.target else {}
    given |= {"mask": wish.mask} if wish.mask else {}
    if wish.controls:
        given["controls"] = ",".join(wish.controls)
    for role, column in given.items():
        if role not in _ROLES:
            raise DataError(f"--columns {role}={column}: {role!r} is no role", f"roles are {', '.join(_ROLES)}.")
        listed = column.split(",") if role in ("control", "controls") else [column]
        for name in listed:
            if name not in names:
                raise DataError(f"{path} has no column {name!r}", f"it has {', '.join(map(repr, names))}.")
        found["controls" if role in ("control", "controls") else role] = (
            listed if role in ("control", "controls") else column
        )
    return found


def _take(found: dict[str, Any], role: str, name: str | None) -> None:
    if role not in found and name is not None:
        found[role] = name


def _without_number(name: str) -> str:
    return re.sub(r"[-_ ]?\d+", "", name)


def _number(name: str) -> int:
    match = re.search(r"(\d+)\D*$", name)
    return int(match[1]) if match else 0


def _missing(path: Path, names: Sequence[str], what: str, role: str, more: str = "") -> DataError:
    listed = ", ".join(map(repr, names)) or "none"
    remedy = f"say which one it is: --columns {role}=NAME{more}."
    return DataError(f"{path}: no column looks like {what}; there are {listed}", remedy)


def _said(columns: Mapping[str, Any], names: Sequence[str]) -> str:
    """A line that says what was understood how."""
    parts: list[str] = []
    used: list[str] = []
    for role, value in columns.items():
        listed = [value] if isinstance(value, str) else value
        used += listed
        parts += (
            [f"{role if len(listed) > 1 else role.removesuffix('s')} is {', '.join(map(repr, listed))}"]
            if listed
            else []
        )
    unused = [name for name in names if name not in used]
    return f"columns: {', '.join(parts)}" + (f"; not used: {', '.join(map(repr, unused))}" if unused else "")


def _instructs(name: str) -> tuple[int, int]:
    """How far a column of text is from an instruction: `edit_prompt` before `prompt` before `original_prompt`."""
    said = words(name)
    roles = {role for role, known in WORDS.items() if role != "text" and any(word in known for word in said)}
    if "instruction" in said or "edit" in said:
        return 0, len(said)
    return (1 if not roles else 2 if roles == {"wanted"} else 3), len(said)


def _lacks_prompts(found: RawTable, column: str) -> bool:
    return any(not str(values.get(column) or "").strip() for _, values in found.rows)


def _with_prompt(found: RawTable, columns: Mapping[str, Any], prompt: str) -> Iterator[dict[str, str]]:
    """The rows with a prompt for those that have none."""
    for _, values in found.rows:
        cells = [values.get(column) for column in columns["controls"]]
        controls = [item for cell in cells for item in (cell if isinstance(cell, list) else [cell]) if item]
        row = {f"path_control_{n}" if n else "path_control": item for n, item in enumerate(controls)}
        own = values.get(columns["prompt"]) if "prompt" in columns else None
        row |= {"path_target": values.get(columns["target"]), "prompt": str(own or "").strip() or prompt}
        row |= {"path_mask": values.get(columns["mask"])} if "mask" in columns else {}
        yield {key: str(value) for key, value in row.items() if value}


def _named(names: Sequence[str], role: Role) -> str | None:
    """The column that is one of the role's words, or says one, in the order of the words; number 0 or the lowest."""
    ordered = sorted(names, key=_number)
    for word in WORDS[role]:
        exact = next((name for name in ordered if words(name) == [word]), None)
        if exact:
            return exact
    for word in WORDS[role]:
        among = next((name for name in ordered if word in words(name)), None)
        if among:
            return among
    return None
