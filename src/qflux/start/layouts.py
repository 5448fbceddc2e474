"""Which pictures of a folder belong together, however they are organised.

qflux's own layout      training_images/ and control_images/
a table                 .csv, .tsv, .jsonl or .json, whatever its columns are called
a Hugging Face data set parquet or arrow files, or what `save_to_disk` wrote
pairs                   before/cat.png and after/cat.png; cat_before.png and cat_after.png; cat/before.png and
                        cat/after.png; cat_a.png and cat_b.png; control_1/, control_2/ and target/; in any subfolders
two folders             day/ and night/, with pictures of the same names
pictures with a text    cat.png and cat.txt

All but the first three have no source of their own: their samples become a table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qflux.data.folder import CONTROLS, TARGETS
from qflux.data.images import SUFFIXES, shown
from qflux.data.tables import SUFFIXES as TABLES
from qflux.data.tables import current_folder
from qflux.errors import DataError
from qflux.start.words import Part, is_plain, part_of, split_name

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
class _Group:
    """The pictures of one sample."""

    given: dict[tuple[bool, int], Path] = field(default_factory=dict)
    """By (is a reference, number): references stand behind what is edited."""
    wanted: Path | None = None
    mask: Path | None = None
    texts: list[Path] = field(default_factory=list)
    """The best one last."""


@dataclass(frozen=True)
class _Folder:
    """What lies in a folder and all below it."""

    root: Path
    images: tuple[Path, ...]
    texts: tuple[Path, ...]
    tables: tuple[Path, ...]
    frames: tuple[Path, ...]


def discover(path: Path, wish: Wish | None = None) -> Discovered:
    """What a folder or a file holds."""
    wish = wish or Wish()
    if not path.exists():
        raise DataError(
            f"there is nothing at {path}{current_folder(path)}", "give the folder or the table of your data."
        )
    require_name(path)
    return _tabular(path, wish) or _pictures(_walk(path), wish)


def _tabular(path: Path, wish: Wish) -> Discovered | None:
    """What has a source of its own: qflux's folders, a table, a data set."""
    from qflux.start.tables import TABULAR, data_set, table  # noqa: PLC0415  (they need what is here)

    if path.is_file():
        if path.suffix.lower() not in TABULAR:
            raise DataError(f"{path} is neither a folder nor a table ({', '.join(sorted(TABULAR))})", DOCS)
        return table(path, wish)
    if (path / TARGETS).is_dir() and wish.target is None:
        return Discovered(f"{TARGETS}/ and {CONTROLS}/", {"type": "folder", "path": str(path)})
    folder = _walk(path)
    if len(folder.tables) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in folder.tables)
        raise DataError(f"{path} holds several tables: {names}", "give the one you mean.")
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return data_set(path, [file for file in folder.frames if file.suffix.lower() == ".arrow"], wish)
    if folder.tables:
        return table(folder.tables[0], wish)
    return data_set(path, folder.frames, wish) if folder.frames else None


def _pictures(folder: _Folder, wish: Wish) -> Discovered:
    """Pictures whose places and names say what belongs together."""
    if wish.target is not None:
        return _by_pattern(folder, wish)
    found = [made for find in (_by_parts, _two_folders, _captioned) if (made := find(folder, wish))]
    # Among hundreds of pictures with texts one may be called `cat_after` and another `cat_before`.
    most = [made for made in found if 2 * _used(made) >= len(folder.images)]
    return next(iter(most), None) or max(found, key=_used, default=None) or _not_understood(folder)


def _used(found: Discovered) -> int:
    """How many pictures an understanding makes use of."""
    return sum(len(row) - 1 for row in found.rows)


def _walk(root: Path) -> _Folder:
    images, texts, tables, frames, count = [], [], [], [], 0
    for place, folders, files in os.walk(root):
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
    own = [table for table in tables if table.parent == root]  # train/metadata.csv counts if there is none here
    return _Folder(root, tuple(images), tuple(texts), tuple(own or tables), tuple(frames))


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


# Pictures that say what they are


def _by_parts(folder: _Folder, wish: Wish) -> Discovered | None:
    """Pairs by the words in their names: of their folders, at their ends, or all of them."""
    for letters in (False, True):
        for cut_ends in (False, True):
            notes: list[str] = []
            groups = _grouped(folder, lambda file, c=cut_ends, m=letters: _placed(folder.root, file, c, m), notes)  # type: ignore[misc]
            pairs = {key: group for key, group in groups.items() if group.wanted and group.given}
            if pairs:
                alone = [key for key, group in groups.items() if key not in pairs and (group.wanted or group.given)]
                _note_alone(sorted(alone), notes)
                used = {file for group in pairs.values() for file in (group.wanted, *group.given.values(), group.mask)}
                rest = [file for file in folder.images if file not in used and not _is_alone(folder, file, alone)]
                _note_alone([str(file.relative_to(folder.root)) for file in rest], notes)
                return _table(folder, f"pairs: {_described(folder.root, pairs)}", pairs, wish, notes)
    return None


def _is_alone(folder: _Folder, file: Path, alone: Sequence[str]) -> bool:
    """Whether it was named among those without a partner."""
    relative = file.relative_to(folder.root).with_suffix("")
    return any(key in (str(relative), relative.name) or relative.name.startswith(f"{key}_") for key in alone)


def _placed(root: Path, file: Path, cut_ends: bool, letters: bool) -> tuple[str, Part] | None:
    """The sample that a picture belongs to, and what it is of it; nothing if its name does not say."""
    *above, stem = file.relative_to(root).with_suffix("").parts
    ending = split_name(stem, letters)
    for level, name in enumerate(above):
        part = part_of(name, letters)
        if part is None or (ending and not ending[0] and (part.role == "reference" or not is_plain(name))):
            continue  # style_7/before.png: the file says it
        rest = [*above[:level], *above[level + 1 :]]
        # `cat_control_1` and `cat_mask` may stand in either folder; other endings are part of a name until pairs
        # can't be found with them.
        if ending and ending[0] and (ending[1].role == "mask" or (ending[1].role == "given" and ending[1].number)):
            return "/".join([*rest, ending[0]]), ending[1] if ending[1].role == "mask" else Part(
                "given", ending[1].number
            )
        own = ending[0] if cut_ends and ending else stem
        return "/".join([*rest, own]), part
    if ending is None:
        return None
    own, part = ending
    return "/".join([*above, own] if own else above), part


def _grouped(folder: _Folder, placed: Callable[[Path], tuple[str, Part] | None], notes: list[str]) -> dict[str, _Group]:
    """Samples by name. Texts go to the sample of their name, wherever they lie."""
    groups: dict[str, _Group] = {}
    for file in folder.images:
        found = placed(file)
        if found is None or found[1].role == "text":
            continue
        key, part = found
        group = groups.setdefault(key, _Group())
        taken = _put(group, part, file)
        if taken:
            notes.append(f"{_name(folder, file)} is left aside: {_name(folder, taken)} has its place")
    for file in folder.texts:
        relative = file.relative_to(folder.root).with_suffix("")
        found = placed(file)
        keys = [str(relative), *([found[0]] if found else [])]
        for key in keys:
            if key in groups:
                groups[key].texts.append(file)
    return groups


def _put(group: _Group, part: Part, file: Path) -> Path | None:
    """Give a picture its place in a sample; what has the place already, if anything."""
    if part.role in ("given", "reference"):
        place = (part.role == "reference", part.number)
        taken = group.given.get(place)
        group.given.setdefault(place, file)
        return taken
    if part.role == "mask":
        group.mask, taken = group.mask or file, group.mask
        return taken
    group.wanted, taken = group.wanted or file, group.wanted
    return taken


# Pictures that do not


def _two_folders(folder: _Folder, wish: Wish) -> Discovered | None:
    """Two folders with pictures of the same names: the first by name is what is edited."""
    by_folder: dict[str, dict[str, Path]] = {}
    for file in folder.images:
        top, *inside = file.relative_to(folder.root).parts
        if inside:
            by_folder.setdefault(top, {}).setdefault(str(Path(*inside).with_suffix("")), file)
    if len(by_folder) != 2:
        return None
    (first, given), (second, wanted) = sorted(by_folder.items())
    pairs = {key: _Group({(False, 0): given[key]}, wanted[key]) for key in sorted(given.keys() & wanted.keys())}
    if not pairs:
        return None
    for file in folder.texts:
        relative = file.relative_to(folder.root).with_suffix("")
        key = str(Path(*relative.parts[1:])) if len(relative.parts) > 1 else str(relative)
        if key in pairs:
            pairs[key].texts.append(file)
    notes = [
        f"{first}/ is taken for the pictures to edit and {second}/ for the wanted ones; "
        f"the other way round: --control {second} --target {first}"
    ]
    _note_alone(sorted(given.keys() ^ wanted.keys()), notes)
    return _table(folder, f"pairs in {first}/ and {second}/", pairs, wish, notes)


def _captioned(folder: _Folder, wish: Wish) -> Discovered | None:
    """Pictures with a text beside them, and nothing to edit; or with one text for all."""
    groups: dict[str, _Group] = {}
    texts = {file.with_suffix(""): file for file in folder.texts}
    for file in folder.images:
        own = file.with_suffix("")
        base = own.with_name(own.name.removesuffix("_mask"))
        if base != own and any(base.with_suffix(suffix) in folder.images for suffix in SUFFIXES):
            groups.setdefault(str(base.relative_to(folder.root)), _Group()).mask = file
            continue
        group = groups.setdefault(str(own.relative_to(folder.root)), _Group())
        group.wanted = group.wanted or file
        group.texts += [texts[own]] if own in texts else []
    groups = {key: group for key, group in groups.items() if group.wanted}
    if not groups or not (wish.prompt or any(group.texts for group in groups.values())):
        return None
    return _table(folder, "pictures with texts, to be made from the text alone", groups, wish, [])


def _by_pattern(folder: _Folder, wish: Wish) -> Discovered:
    """Pairs as somebody has described them."""
    groups: dict[str, _Group] = {}
    notes: list[str] = []
    wanted = _matching(folder, str(wish.target), folder.images)
    for key, file in wanted.items():
        groups[key] = _Group(wanted=file)
    for number, pattern in enumerate(wish.controls):
        found = _matching(folder, pattern, folder.images)
        common = found.keys() & groups.keys()
        if not common:
            raise DataError(
                f"--control {pattern!r} and --target {wish.target!r} have no name in common: "
                f"{', '.join(list(found)[:3])} and {', '.join(list(groups)[:3])}",
                "a `*` stands for the name of a sample, which must be the same in both.",
            )
        for key in common:
            groups[key].given[False, number] = found[key]
        _note_alone(sorted(found.keys() ^ groups.keys()), notes)
    for key, file in _matching(folder, wish.mask, folder.images).items() if wish.mask else ():
        if key in groups:
            groups[key].mask = file
    for file in folder.texts:
        relative = str(file.relative_to(folder.root).with_suffix(""))
        for key, group in groups.items():
            beside = [picture.with_suffix("") for picture in (group.wanted, *group.given.values()) if picture]
            if file.with_suffix("") in beside or relative == key:
                group.texts.append(file)
    complete = {key: group for key, group in groups.items() if len(group.given) == len(wish.controls)}
    said = " and ".join([*wish.controls, str(wish.target)])
    return _table(folder, f"pairs of {said}", complete, wish, notes)


def _matching(folder: _Folder, pattern: str, files: Sequence[Path]) -> dict[str, Path]:
    """Pictures that fit a pattern, by what its `*` stands for. A folder means everything in it."""
    plain = pattern.removesuffix("/")
    full = f"{plain}/*" if "*" not in plain else plain
    full = re.sub(r"\.(png|jpe?g|webp|bmp|tiff?|gif)$", "", full, flags=re.IGNORECASE)
    if full.count("*") != 1:
        raise DataError(f"the pattern {pattern!r} has {full.count('*')} of `*`", "it takes one, for a sample's name.")
    before, after = map(re.escape, full.split("*"))
    found: dict[str, Path] = {}
    for file in files:
        match = re.fullmatch(f"{before}(.+){after}", str(file.relative_to(folder.root).with_suffix("")), re.DOTALL)
        if match:
            found.setdefault(match[1], file)
    if not found:
        raise DataError(
            f"nothing in {folder.root} fits {pattern!r}:\n{tree(folder.root)}", "name a folder, or a pattern."
        )
    return found


# The table


def _table(
    folder: _Folder,
    kind: str,
    groups: Mapping[str, _Group],
    wish: Wish,
    notes: list[str],
) -> Discovered:
    """The samples as rows. Where no sample has a text, all get one that says which pictures became which."""
    common = next((text for file in folder.texts if _is_common(folder, file) and (text := _read(file))), None)
    texts = {key: _text(group) or wish.prompt or common for key, group in groups.items()}
    if groups and not any(texts.values()):
        default = _default_prompt(folder.root, groups)
        notes.append(f'there is no text: every sample gets the prompt "{default}"; --prompt "…" gives them another')
        texts = dict.fromkeys(groups, default)
    without = [key for key, text in texts.items() if not text]
    if without:
        _note_alone(without, notes, "a text", '; --prompt "…" gives them one')
    rows = [_row(folder.root, groups[key], text) for key, text in sorted(texts.items()) if text]
    if not rows:
        raise DataError(f"no sample in {folder.root} is complete: {kind}\n{tree(folder.root)}", DOCS)
    return Discovered(kind, {"type": "jsonl"}, rows, notes)


def _row(root: Path, group: _Group, prompt: str) -> dict[str, str]:
    files = {f"path_control_{n}" if n else "path_control": group.given[k] for n, k in enumerate(sorted(group.given))}
    if group.wanted:
        files["path_target"] = group.wanted
    if group.mask:
        files["path_mask"] = group.mask
    for file in files.values():
        require_name(file)
    return {name: str(file.relative_to(root)) for name, file in files.items()} | {"prompt": prompt}


def _is_common(folder: _Folder, file: Path) -> bool:
    """A text for all samples: prompt.txt beside the folders."""
    found = split_name(file.stem)
    return file.parent == folder.root and found is not None and found[0] == "" and found[1].role == "text"


def _text(group: _Group) -> str | None:
    """The text of a sample: beside the wanted picture before any other place."""
    beside = [f for f in group.texts if group.wanted and f.with_suffix("") == group.wanted.with_suffix("")]
    return next((text for file in [*beside, *reversed(group.texts)] if (text := _read(file))), None)


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8-sig").strip() or None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8", "save it as UTF-8.") from None


def _default_prompt(root: Path, groups: Mapping[str, _Group]) -> str:
    """Which pictures became which: where the names of a pair differ."""
    group = next(iter(groups.values()))
    if group.given and group.wanted:
        pair = [file.relative_to(root).with_suffix("").parts for file in (group.given[min(group.given)], group.wanted)]
        for one, other in zip(*pair, strict=False):
            if one != other:
                ends = [re.split(r"[-_. ]", name)[-1] if one == pair[0][-1] else name for name in (one, other)]
                return " to ".join(ends)
    return root.resolve().name


def _described(root: Path, pairs: Mapping[str, _Group]) -> str:
    """One pair as an example, in full."""
    group = next(iter(pairs.values()))
    files = [*(group.given[place] for place in sorted(group.given)), group.wanted]
    return " + ".join(str(file.relative_to(root)) for file in files[:-1] if file) + f" → {_relative(root, files[-1])}"


def _relative(root: Path, file: Path | None) -> str:
    return str(file.relative_to(root)) if file else ""


def _name(folder: _Folder, file: Path) -> str:
    return shown(file.relative_to(folder.root))


def _note_alone(names: Sequence[str], notes: list[str], what: str = "a partner", remedy: str = "") -> None:
    if names:
        listed = ", ".join(map(shown, names[:5])) + (", …" if len(names) > 5 else "")
        notes.append(f"left aside, without {what}: {listed} ({len(names)}){remedy}")


# What is not understood


def _not_understood(folder: _Folder) -> Discovered:
    tried = (
        "tried: training_images/ and control_images/; a table (.csv, .tsv, .jsonl, .json) or parquet files; names that "
        "say what they are (before, after, input, output, source, target, control_1, mask, _a and _b) in folders or at "
        "the end of file names; two folders with pictures of the same names; pictures with a .txt beside them"
    )
    raise DataError(
        f"no data of a known organisation in {folder.root}:\n{tree(folder.root)}\n{tried}",
        "say which pictures are which, for example --control day --target night, or --control '*_1' --target '*_2'; "
        "pictures without a partner need a text (--prompt). " + DOCS,
    )


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
