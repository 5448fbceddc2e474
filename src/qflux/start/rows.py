"""Samples as the rows of a table, each with its text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from qflux.data.images.decode import shown
from qflux.errors import DataError
from qflux.start.folder import DOCS, Discovered, Folder, Group, Wish, require_name, tree
from qflux.start.words import split_name


def as_table(
    folder: Folder,
    kind: str,
    groups: Mapping[str, Group],
    wish: Wish,
    notes: list[str],
) -> Discovered:
    """The samples as rows. Where no sample has a text, all get one that says which pictures became which."""
    common = next((text for file in folder.texts if _is_common(folder, file) and (text := read_text(file))), None)
    texts = {key: _text(group) or wish.prompt or common for key, group in groups.items()}
    if groups and not any(texts.values()):
        default = _default_prompt(folder.root, groups)
        notes.append(f'there is no text: every sample gets the prompt "{default}"; --prompt "…" gives them another')
        texts = dict.fromkeys(groups, default)
    without = [key for key, text in texts.items() if not text]
    if without:
        note_alone(without, notes, "a text", '; --prompt "…" gives them one')
    rows = [_row(folder.root, groups[key], text) for key, text in sorted(texts.items()) if text]
    if not rows:
        raise DataError(f"no sample in {folder.root} is complete: {kind}\n{tree(folder.root)}", DOCS)
    return Discovered(kind, {"type": "jsonl"}, rows, notes)


def _row(root: Path, group: Group, prompt: str) -> dict[str, str]:
    files = {f"path_control_{n}" if n else "path_control": group.given[k] for n, k in enumerate(sorted(group.given))}
    if group.wanted:
        files["path_target"] = group.wanted
    if group.mask:
        files["path_mask"] = group.mask
    for file in files.values():
        require_name(file)
    return {name: str(file.relative_to(root)) for name, file in files.items()} | {"prompt": prompt}


def _is_common(folder: Folder, file: Path) -> bool:
    """A text for all samples: prompt.txt beside the folders."""
    found = split_name(file.stem)
    return file.parent == folder.root and found is not None and found.rest == "" and found.role == "text"


def _text(group: Group) -> str | None:
    """The text of a sample: beside the wanted picture before any other place."""
    beside = [f for f in group.texts if group.wanted and f.with_suffix("") == group.wanted.with_suffix("")]
    return next((text for file in [*beside, *reversed(group.texts)] if (text := read_text(file))), None)


def read_text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8-sig").strip() or None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8", "save it as UTF-8.") from None


def _default_prompt(root: Path, groups: Mapping[str, Group]) -> str:
    """Which pictures became which: where the names of a pair differ."""
    group = next(iter(groups.values()))
    if group.given and group.wanted:
        pair = [file.relative_to(root).with_suffix("").parts for file in (group.given[min(group.given)], group.wanted)]
        for one, other in zip(*pair, strict=False):
            if one != other:
                ends = [re.split(r"[-_. ]", name)[-1] if one == pair[0][-1] else name for name in (one, other)]
                return " to ".join(ends)
    return root.resolve().name


def described(root: Path, pairs: Mapping[str, Group]) -> str:
    """One pair as an example, in full."""
    group = next(iter(pairs.values()))
    files = [*(group.given[place] for place in sorted(group.given)), group.wanted]
    return " + ".join(str(file.relative_to(root)) for file in files[:-1] if file) + f" → {_relative(root, files[-1])}"


def _relative(root: Path, file: Path | None) -> str:
    return str(file.relative_to(root)) if file else ""


def name_of(folder: Folder, file: Path) -> str:
    return shown(file.relative_to(folder.root))


def note_alone(names: Sequence[str], notes: list[str], what: str = "a partner", remedy: str = "") -> None:
    if names:
        listed = ", ".join(map(shown, names[:5])) + (", …" if len(names) > 5 else "")
        notes.append(f"left aside, without {what}: {listed} ({len(names)}){remedy}")
