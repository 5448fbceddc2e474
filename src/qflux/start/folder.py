"""What lies in somebody's folder, and the nouns of what is made of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qflux.data.images.decode import SUFFIXES, shown
from qflux.data.sources.tables import SUFFIXES as TABLES
from qflux.errors import DataError

TABLE = ".pairs.jsonl"
"""How tables that `init` writes end; they are not taken for data."""
TEXTS = (".txt", ".caption")
DOCS = "docs/data.md says how data can be organised."
MOST_FILES = 2_000_000


@dataclass(frozen=True)
class Wish:
    """What somebody says about their data, besides where they are."""

    prompt: str | None = None
    """For samples that have no text of their own."""
    target: str | None = None
    """A folder, or a pattern with one `*` for the name of a sample; in a table a column."""
    controls: tuple[str, ...] = ()
    mask: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """Roles and the columns of a table that have them."""


@dataclass(frozen=True)
class Discovered:
    """A source as it stands in a config, and the rows of a table if one has to be written for it."""

    kind: str
    """In words."""
    source: dict[str, Any]
    rows: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was understood how, and what was left aside."""


@dataclass
class Group:
    """The pictures of one sample."""

    given: dict[tuple[bool, int], Path] = field(default_factory=dict)
    """By (is a reference, number): references stand behind what is edited."""
    wanted: Path | None = None
    mask: Path | None = None
    bare: Path | None = None
    """One whose name says nothing: beside `cat_edited.png`, `cat.png` is what was edited."""
    texts: list[Path] = field(default_factory=list)
    """The best one last."""

    @property
    def is_pair(self) -> bool:
        return self.wanted is not None and bool(self.given)

    @property
    def files(self) -> list[Path]:
        """All its pictures."""
        return [*self.given.values(), *(file for file in (self.wanted, self.mask) if file)]


@dataclass(frozen=True)
class Folder:
    """What lies in a folder and all below it."""

    root: Path
    images: tuple[Path, ...]
    texts: tuple[Path, ...]
    tables: tuple[Path, ...]
    frames: tuple[Path, ...]


def walk(root: Path) -> Folder:
    images, texts, tables, frames, count = [], [], [], [], 0
    for place, folders, files in os.walk(root):
        if _is_ours(folders, files):
            folders[:] = []
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            count += 1
            if count > MOST_FILES:
                raise DataError(f"{root} holds more than {MOST_FILES:,} files", "list the samples in a table.")
            file, suffix = Path(place) / name, Path(name).suffix.lower()
            if suffix in SUFFIXES:
                images.append(file)
            elif suffix in TEXTS:
                texts.append(file)
            elif suffix in TABLES and not name.endswith(TABLE) and _is_table(file, Path(place) == root):
                tables.append(file)
            elif suffix in (".parquet", ".arrow"):
                frames.append(file)
    return Folder(root, tuple(images), tuple(texts), tuple(tables), tuple(frames))


def _is_ours(folders: Sequence[str], files: Sequence[str]) -> bool:
    """Whether a folder is a run, a cache, a list of edits or corrections, which may lie beside the data."""
    if "corrections.jsonl" in files:
        return True
    is_run, is_cache = {"config.yaml", "ledger.jsonl"} <= set(files), "index.jsonl" in files and "entries" in folders
    return is_run or is_cache or {".lock", "contact_sheet.png"} <= set(files)


def _is_table(file: Path, at_the_top: bool) -> bool:
    """Not every .json is one: programs leave their settings beside the data, and a file for each picture."""
    if file.suffix.lower() != ".json":
        return True
    if not at_the_top:
        return False
    with file.open("rb") as opened:
        return opened.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def require_name(path: Path) -> None:
    """Configs and tables are UTF-8; a name that is not can't stand in them."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DataError(f"the name {str(path)!r} is not UTF-8", "rename it.") from None


def tree(root: Path, most: int = 12) -> str:
    """A folder in a few lines: what it holds, with the first names of each kind."""
    lines = [f"  {shown(root.resolve().name)}/"]
    listed = list(_levels(root))
    lines += [f"  {'  ' * depth}{text}" for depth, text in listed[:most]]
    return "\n".join(lines + ([f"    … and {len(listed) - most} more lines"] if len(listed) > most else []))


def _levels(folder: Path, depth: int = 1) -> Iterator[tuple[int, str]]:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if not entry.is_dir()]
    kinds: dict[str, list[str]] = {}
    for file in files:
        kinds.setdefault(file.suffix.lower() or "without a suffix", []).append(shown(file.name))
    if not entries:
        yield depth, "(nothing)"
    for kind, names in kinds.items():
        yield depth, f"{len(names)} {kind}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    for entry in entries:
        if entry.is_dir():
            yield depth, f"{shown(entry.name)}/"
            if depth < 3:
                yield from _levels(entry, depth + 1)
