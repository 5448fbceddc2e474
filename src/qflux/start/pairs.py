"""Pairs by the words in their names: of their folders, at their ends, or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qflux.data.sources.folder import TARGETS
from qflux.start.folder import Discovered, Folder, Group, Wish
from qflux.start.rows import as_table, described, name_of, note_alone
from qflux.start.words import Part, part_of, split_name


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


def by_parts(folder: Folder, wish: Wish) -> Discovered | None:
    """Pairs by the words in their names: of their folders, at their ends, or all of them."""
    best: tuple[int, dict[str, Group], dict[Path, Path]] = (0, {}, {})
    for reading in _READINGS:
        groups, aside = _grouped(folder, reading)
        pairs = {key: group for key, group in groups.items() if group.is_pair}
        used = sum(len(group.files) for group in pairs.values()) - len(aside)
        if pairs and used > best[0]:
            best = used, pairs, aside
    _, pairs, aside = best
    if not pairs:
        return None
    notes = [f"{name_of(folder, f)} is left aside: {name_of(folder, t)} has its place" for f, t in aside.items()]
    known = {file for group in pairs.values() for file in group.files} | aside.keys()
    note_alone([name_of(folder, file) for file in folder.images if file not in known], notes)
    return as_table(folder, f"pairs: {described(folder.root, pairs)}", pairs, wish, notes)


def _grouped(folder: Folder, reading: _Reading) -> tuple[dict[str, Group], dict[Path, Path]]:
    """Samples by name, and pictures that are left aside, each with the one that has its place.

    Texts go to the sample of their name, wherever they lie.
    """
    groups: dict[str, Group] = {}
    aside: dict[Path, Path] = {}
    plain = {key for file in folder.images if (key := _folder_key(folder, file, reading))}
    for file in folder.images:
        key, part = _placed(folder, file, reading, plain)
        group = groups.setdefault(key, Group())
        if part is None:
            group.bare = group.bare or file
        elif part.role != "text" and (taken := _put(group, part, file, reading)):
            aside[file] = taken
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


def _folder_key(folder: Folder, file: Path, reading: _Reading) -> str | None:
    """The name of a sample as the folders alone have it."""
    *above, stem = file.relative_to(folder.root).with_suffix("").parts
    found = _folder_part(above, reading)
    return _key(above, found[0], found[1], stem, reading) if found else None


def _key(above: Sequence[str], level: int, part: Part, own: str, reading: _Reading) -> str:
    number = [str(part.number)] if reading.numbers_are_names and part.number is not None else []
    return "/".join([*above[:level], *filter(None, [part.rest]), *number, *above[level + 1 :], *filter(None, [own])])


def _placed(folder: Folder, file: Path, reading: _Reading, plain: set[str]) -> tuple[str, Part | None]:
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


def _put(group: Group, part: Part, file: Path, reading: _Reading) -> Path | None:
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
