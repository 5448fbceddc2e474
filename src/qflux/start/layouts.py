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

import re
from collections.abc import Sequence
from pathlib import Path

from qflux.data.sources.folder import CONTROLS, TARGETS
from qflux.data.sources.listing import current_folder
from qflux.errors import DataError
from qflux.start.folder import DOCS, TABLE, Discovered, Folder, Group, Wish, require_name, tree, walk
from qflux.start.pairs import by_parts
from qflux.start.rows import as_table, note_alone, read_text
from qflux.start.tables import TABULAR, data_set, table
from qflux.start.words import SPLITS, part_of

__all__ = ["DOCS", "TABLE", "Discovered", "Wish", "discover"]


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
    if path.is_file():
        if path.suffix.lower() not in TABULAR:
            raise DataError(f"{path} is neither a folder nor a table ({', '.join(sorted(TABULAR))})", DOCS)
        return table(path, wish)
    if (path / TARGETS).is_dir() and wish.target is None and wish.prompt is None:
        return Discovered(f"{TARGETS}/ and {CONTROLS}/", {"type": "folder", "path": str(path)})
    folder = walk(path)
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


def _pictures(folder: Folder, wish: Wish) -> Discovered | None:
    """Pictures whose places and names say what belongs together."""
    if wish.columns:
        raise DataError(f"--columns is for a table, and {folder.root} holds none", "use --target and --control.")
    if wish.target is not None:
        return _by_pattern(folder, wish)
    if wish.mask is not None:
        raise DataError("--mask needs --target", "say which pictures are wanted, too.")
    found = [made for find in (by_parts, _two_folders, _captioned) if (made := find(folder, wish))]
    # Among hundreds of pictures with texts one may be called `cat_after` and another `cat_before`.
    most = [made for made in found if 2 * _used(made) >= len(folder.images)]
    return next(iter(most), None) or max(found, key=_used, default=None)


def _used(found: Discovered) -> int:
    """How many pictures an understanding makes use of."""
    return sum(len(row) - 1 for row in found.rows)


def _two_folders(folder: Folder, wish: Wish) -> Discovered | None:
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
    pairs = {key: Group({(False, 0): given[key]}, wanted[key]) for key in sorted(given.keys() & wanted.keys())}
    texts = {file.with_suffix(""): file for file in folder.texts}
    for key, group in pairs.items():
        beside = [texts[file.with_suffix("")] for file in (given[key], wanted[key]) if file.with_suffix("") in texts]
        if len(beside) == 2 and read_text(beside[0]) != read_text(beside[1]):
            return None  # both have a text of their own: two sets of pictures, not pairs
        group.texts += [*beside, *(file for at, file in texts.items() if at == folder.root / key)]
    if not pairs:
        return None
    notes = [
        f"{first}/ is taken for the pictures to edit and {second}/ for the wanted ones; "
        f"the other way round: --control {second} --target {first}"
    ]
    note_alone(sorted(given.keys() ^ wanted.keys()), notes)
    return as_table(folder, f"pairs in {first}/ and {second}/", pairs, wish, notes)


def _rank(name: str) -> int:
    """Where a folder stands among two: before one that says nothing, or behind it."""
    part = part_of(name)
    return {"given": 0, "wanted": 2}.get(part.role, 1) if part else 1


def _captioned(folder: Folder, wish: Wish) -> Discovered | None:
    """Pictures with a text beside them, and nothing to edit; or with one text for all."""
    groups: dict[str, Group] = {}
    texts = {file.with_suffix(""): file for file in folder.texts}
    stems = {file.with_suffix("") for file in folder.images}
    for file in folder.images:
        own = file.with_suffix("")
        base = own.with_name(own.name.removesuffix("_mask"))
        if base != own and base in stems:
            groups.setdefault(str(base.relative_to(folder.root)), Group()).mask = file
            continue
        group = groups.setdefault(str(own.relative_to(folder.root)), Group())
        group.wanted = group.wanted or file
        group.texts += [texts[own]] if own in texts else []
    groups = {key: group for key, group in groups.items() if group.wanted}
    if not groups or not (wish.prompt or any(group.texts for group in groups.values())):
        return None
    return as_table(folder, "pictures with texts, to be made from the text alone", groups, wish, [])


def _by_pattern(folder: Folder, wish: Wish) -> Discovered:
    """Pairs as somebody has described them."""
    groups: dict[str, Group] = {}
    notes: list[str] = []
    wanted = _matching(folder, str(wish.target), folder.images)
    for key, file in wanted.items():
        groups[key] = Group(wanted=file)
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
        note_alone(sorted(found.keys() ^ groups.keys()), notes)
    for key, file in _matching(folder, wish.mask, folder.images).items() if wish.mask else ():
        if key in groups:
            groups[key].mask = file
    texts = {file.with_suffix(""): file for file in folder.texts}
    for key, group in groups.items():
        places = [folder.root / key, *(file.with_suffix("") for file in group.files)]
        group.texts += [texts[place] for place in dict.fromkeys(places) if place in texts]
    complete = {key: group for key, group in groups.items() if len(group.given) == len(wish.controls)}
    said = " and ".join([*wish.controls, str(wish.target)])
    return as_table(folder, f"pairs of {said}", complete, wish, notes)


def _matching(folder: Folder, pattern: str, files: Sequence[Path]) -> dict[str, Path]:
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


def _not_understood(folder: Folder) -> Discovered:
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
