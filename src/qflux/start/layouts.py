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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qflux.data.folder import CONTROLS, TARGETS
from qflux.data.images import SUFFIXES, shown
from qflux.data.tables import SUFFIXES as TABLES
from qflux.data.tables import current_folder
from qflux.errors import DataError
from qflux.start.words import SPLITS, Part, part_of, split_name

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
    return _understood(path, wish)


def _understood(path: Path, wish: Wish) -> Discovered:
    """What has a source of its own (qflux's folders, a table, a data set), and then pictures."""
    from qflux.start.tables import TABULAR, data_set, table  # noqa: PLC0415  (they need what is here)

    if path.is_file():
        if path.suffix.lower() not in TABULAR:
            raise DataError(f"{path} is neither a folder nor a table ({', '.join(sorted(TABULAR))})", DOCS)
        return table(path, wish)
    if (path / TARGETS).is_dir() and wish.target is None and wish.prompt is None:
        return Discovered(f"{TARGETS}/ and {CONTROLS}/", {"type": "folder", "path": str(path)})
    folder = _walk(path)
    own = [file for file in folder.tables if file.parent == path]
    is_saved = (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
    frames = [file for file in folder.frames if not is_saved or file.suffix.lower() == ".arrow"]
    if is_saved or (frames and not own):
        return data_set(path, frames, wish)
    # A table further in (train/metadata.csv) counts where pictures say nothing by themselves.
    found = None if own else _pictures(folder, wish)
    tables = own or folder.tables
    if len(tables) > 1 and found is None:
        raise _several(path, tables)
    return found or (table(tables[0], wish) if tables else _not_understood(folder))


def _several(path: Path, tables: Sequence[Path]) -> DataError:
    names = ", ".join(str(file.relative_to(path)) for file in tables)
    return DataError(f"{path} holds several tables: {names}", "give the one you mean.")


def _pictures(folder: _Folder, wish: Wish) -> Discovered | None:
    """Pictures whose places and names say what belongs together."""
    if wish.columns:
        raise DataError(f"--columns is for a table, and {folder.root} holds none", "use --target and --control.")
    if wish.target is not None:
        return _by_pattern(folder, wish)
    if wish.mask is not None:
        raise DataError("--mask needs --target", "say which pictures are wanted, too.")
    found = [made for find in (_by_parts, _two_folders, _captioned) if (made := find(folder, wish))]
    # Among hundreds of pictures with texts one may be called `cat_after` and another `cat_before`.
    most = [made for made in found if 2 * _used(made) >= len(folder.images)]
    return next(iter(most), None) or max(found, key=_used, default=None)


def _used(found: Discovered) -> int:
    """How many pictures an understanding makes use of."""
    return sum(len(row) - 1 for row in found.rows)


def _walk(root: Path) -> _Folder:
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
    return _Folder(root, tuple(images), tuple(texts), tuple(tables), tuple(frames))


def _is_ours(folders: Sequence[str], files: Sequence[str]) -> bool:
    """Whether a folder is a run, a cache or a list of edits, which may lie beside the data."""
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


# Pictures that say what they are


@dataclass(frozen=True)
class _Reading:
    """One way to read names. All are tried, and the one that makes use of the most pictures is taken."""

    letters: bool
    """`_a` and `_b` say something."""
    cuts_ends: bool
    """In a folder that says its part, so does the end of a name: Inputs/1_in.png, Outputs/1_out.png."""
    numbers_are_names: bool
    """before_1 and after_1 are sample 1; otherwise control_1 and control_2 are controls of one sample."""


_READINGS = [
    _Reading(letters, cuts, names) for letters in (False, True) for cuts in (False, True) for names in (False, True)
]


def _by_parts(folder: _Folder, wish: Wish) -> Discovered | None:
    """Pairs by the words in their names: of their folders, at their ends, or all of them."""
    best: tuple[int, dict[str, _Group], list[str]] = (0, {}, [])
    for reading in _READINGS:
        groups, aside = _grouped(folder, reading)
        pairs = {key: group for key, group in groups.items() if group.is_pair}
        used = sum(len(group.files) for group in pairs.values()) - len(aside)
        if pairs and used > best[0]:
            best = used, pairs, aside
    _, pairs, notes = best
    if not pairs:
        return None
    taken = {file for group in pairs.values() for file in group.files}
    told = {note.split(" is left aside")[0] for note in notes}
    alone = [name for file in folder.images if file not in taken and (name := _name(folder, file)) not in told]
    _note_alone(alone, notes)
    return _table(folder, f"pairs: {_described(folder.root, pairs)}", pairs, wish, notes)


def _grouped(folder: _Folder, reading: _Reading) -> tuple[dict[str, _Group], list[str]]:
    """Samples by name, and pictures that were left aside. Texts go to the sample of their name, wherever they lie."""
    groups: dict[str, _Group] = {}
    aside: list[str] = []
    plain = {key for file in folder.images if (key := _folder_key(folder, file, reading))}
    for file in folder.images:
        key, part = _placed(folder, file, reading, plain)
        group = groups.setdefault(key, _Group())
        if part is None:
            group.bare = group.bare or file
        elif part.role != "text" and (taken := _put(group, part, file, reading)):
            aside.append(f"{_name(folder, file)} is left aside: {_name(folder, taken)} has its place")
    for group in groups.values():
        if group.bare and group.wanted and not group.given:
            group.given[False, 0] = group.bare
        elif group.bare and group.given and not group.wanted:
            group.wanted = group.bare
    for file in folder.texts:
        key, _ = _placed(folder, file, reading, plain)
        for name in dict.fromkeys((str(file.relative_to(folder.root).with_suffix("")), key)):
            if name in groups:
                groups[name].texts.append(file)
    return groups, aside


def _folder_part(above: Sequence[str], reading: _Reading) -> tuple[int, Part] | None:
    """The folder that says what its pictures are: the innermost that says nothing else, or else the innermost."""
    found = [(level, part) for level, name in enumerate(above) if (part := _part_of_folder(name, reading))]
    plain = [item for item in found if item[1].is_plain]
    return (plain or found)[-1] if found else None


def _part_of_folder(name: str, reading: _Reading) -> Part | None:
    return Part("wanted") if name == TARGETS else part_of(name, reading.letters)


def _folder_key(folder: _Folder, file: Path, reading: _Reading) -> str | None:
    """The name of a sample as the folders alone have it."""
    *above, stem = file.relative_to(folder.root).with_suffix("").parts
    found = _folder_part(above, reading)
    return _key(above, found[0], found[1], stem, reading) if found else None


def _key(above: Sequence[str], level: int, part: Part, own: str, reading: _Reading) -> str:
    number = [str(part.number)] if reading.numbers_are_names and part.number is not None else []
    return "/".join([*above[:level], *filter(None, [part.rest]), *number, *above[level + 1 :], *filter(None, [own])])


def _placed(folder: _Folder, file: Path, reading: _Reading, plain: set[str]) -> tuple[str, Part | None]:
    """The sample that a picture belongs to, and what it is of it; nothing if its name does not say."""
    *above, stem = file.relative_to(folder.root).with_suffix("").parts
    ending = split_name(stem, reading.letters)
    found = _folder_part(above, reading)
    if found and not (ending and not ending.rest and (found[1].role == "reference" or not found[1].is_plain)):
        level, part = found
        if ending and ending.rest:
            base = _key(above, level, part, ending.rest, reading)
            is_further = ending.role == "given" and ending.number is not None
            # cat_mask and cat_control_1 may stand beside cat; a gas_mask is a picture of its own.
            if base in plain and (ending.role == "mask" or is_further):
                return base, Part("mask") if ending.role == "mask" else Part("given", ending.number)
        own = ending.rest if reading.cuts_ends and ending and ending.rest else stem
        return _key(above, level, part, own, reading), part
    if ending is None:
        return "/".join([*above, stem]), None
    numbered = reading.numbers_are_names and ending.number is not None
    return "/".join([*above, *filter(None, [ending.rest]), *([str(ending.number)] if numbered else [])]), ending


def _put(group: _Group, part: Part, file: Path, reading: _Reading) -> Path | None:
    """Give a picture its place in a sample; what has the place already, if anything."""
    if part.role in ("given", "reference"):
        place = (part.role == "reference", 0 if reading.numbers_are_names else part.number or 0)
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
    """Two folders with pictures of the same names. If no name says it, the first one is what is edited."""
    by_folder: dict[str, dict[str, Path]] = {}
    for file in folder.images:
        top, *inside = file.relative_to(folder.root).parts
        if inside:
            by_folder.setdefault(top, {}).setdefault(str(Path(*inside).with_suffix("")), file)
        if any(part_of(name) for name in inside[:-1]):
            return None  # names further in have said what is what, and it was not enough
    if len(by_folder) != 2 or any(name.lower() in SPLITS for name in by_folder):
        return None
    ordered = sorted(by_folder, key=lambda name: (_rank(name), name))
    roles = {part.role for name in ordered if (part := part_of(name))}
    if roles & {"mask", "text"}:
        return None
    first, second = ordered
    given, wanted = by_folder[first], by_folder[second]
    pairs = {key: _Group({(False, 0): given[key]}, wanted[key]) for key in sorted(given.keys() & wanted.keys())}
    texts = {file.with_suffix(""): file for file in folder.texts}
    for key, group in pairs.items():
        beside = [texts[file.with_suffix("")] for file in (given[key], wanted[key]) if file.with_suffix("") in texts]
        if len(beside) == 2 and _read(beside[0]) != _read(beside[1]):
            return None  # both have a text of their own: two sets of pictures, not pairs
        group.texts += [*beside, *(file for at, file in texts.items() if at == folder.root / key)]
    if not pairs:
        return None
    notes = [
        f"{first}/ is taken for the pictures to edit and {second}/ for the wanted ones; "
        f"the other way round: --control {second} --target {first}"
    ]
    _note_alone(sorted(given.keys() ^ wanted.keys()), notes)
    return _table(folder, f"pairs in {first}/ and {second}/", pairs, wish, notes)


def _rank(name: str) -> int:
    """Where a folder stands among two: before one that says nothing, or behind it."""
    part = part_of(name)
    return {"given": 0, "wanted": 2}.get(part.role, 1) if part else 1


def _captioned(folder: _Folder, wish: Wish) -> Discovered | None:
    """Pictures with a text beside them, and nothing to edit; or with one text for all."""
    groups: dict[str, _Group] = {}
    texts = {file.with_suffix(""): file for file in folder.texts}
    stems = {file.with_suffix("") for file in folder.images}
    for file in folder.images:
        own = file.with_suffix("")
        base = own.with_name(own.name.removesuffix("_mask"))
        if base != own and base in stems:
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
    texts = {file.with_suffix(""): file for file in folder.texts}
    for key, group in groups.items():
        places = [folder.root / key, *(file.with_suffix("") for file in group.files)]
        group.texts += [texts[place] for place in dict.fromkeys(places) if place in texts]
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
    return file.parent == folder.root and found is not None and found.rest == "" and found.role == "text"


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
