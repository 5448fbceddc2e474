"""A folder of samples:

training_images/<base>.png            the target
training_images/<base>.txt            the prompt
training_images/<base>_caption_1.txt  other wordings of it, counted from 1; a visit draws one of all
training_images/<base>_prompt_2.txt   what a second text encoder reads instead, in families that have one
control_images/<base>.png             the first control, aligned with the target
control_images/<base>_control_1.png   further controls, counted from 1
…_images/<base>_mask.png              the edited region, white; in either folder
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from qflux.data.images.decode import SUFFIXES, ImageFile, shown
from qflux.data.sources.listing import ListedSample, Listing, current_folder, note_controls
from qflux.data.sources.naming import PROMPT_2, further_caption, further_control, masked_base, owner
from qflux.data.sources.wording import Wording, worded
from qflux.errors import DataError

TARGETS, CONTROLS = "training_images", "control_images"


def read_folder(root: Path) -> Listing:
    """All samples of a folder, sorted by name, and everything that is wrong with it."""
    targets_dir, controls_dir = root / TARGETS, root / CONTROLS
    if not targets_dir.is_dir():
        raise DataError(
            f"no folder {targets_dir}{current_folder(root)}",
            f"a data folder holds {TARGETS}/ (and {CONTROLS}/ for edits).",
        )
    listing = Listing(shown(root))
    unclear: set[str] = set()
    """Targets of which it can't be told what belongs to them; they are left out."""
    there = _Folder.read(targets_dir)
    listed = _by_stem(there, listing, unclear)
    beside = _by_stem(_Folder.read(controls_dir), listing, unclear) if controls_dir.is_dir() else {}
    if not controls_dir.is_dir():
        listing.notes.append(f"there is no folder {shown(controls_dir)}: the samples have no control images")
    targets = {stem: path for stem, path in listed.items() if masked_base(stem, listed) is None}
    masks = _masks(targets, [*listed.values(), *beside.values()], listing, unclear)
    controls = _controls(targets, beside, listing, unclear)
    texts = _texts(targets, there, listing)

    for base, target in sorted(targets.items()):
        wording = _wording(target, texts.get(base, {}), listing)
        if wording is None or base in unclear:
            continue
        mask = ImageFile(masks[base]) if base in masks else None
        images = tuple(map(ImageFile, controls.get(base, ())))
        found = ListedSample(shown(base), ImageFile(target), wording.prompt, images, mask)
        listing.samples.append(wording.put_into(found))
    if controls:
        note_controls(listing)
    return listing


@dataclass(frozen=True)
class _Folder:
    """What is in a folder, looked at once: there may be tens of thousands."""

    path: Path
    files: list[Path]
    """By name; also links that lead nowhere: those are found out when the image is read."""
    folders: list[str]

    @classmethod
    def read(cls, path: Path) -> _Folder:
        with os.scandir(path) as entries:
            found = sorted((entry.name, _kind(entry)) for entry in entries)
        files = [path / name for name, kind in found if kind == "file" and not name.startswith(".")]
        return cls(path, files, [name for name, kind in found if kind == "folder"])


def _kind(entry: os.DirEntry[str]) -> str:
    try:
        if entry.is_dir():
            return "folder"
        return "file" if entry.is_file() or entry.is_symlink() else "other"
    except OSError:  # a link to itself
        return "file"


def _by_stem(folder: _Folder, listing: Listing, unclear: set[str]) -> dict[str, Path]:
    """Images by file name without suffix; two images of one name are ambiguous."""
    images: dict[str, Path] = {}
    ignored = [f"{name}/" for name in folder.folders]
    for file in folder.files:
        if file.suffix.lower() not in SUFFIXES:
            ignored += [] if file.suffix.lower() == ".txt" and folder.path.name == TARGETS else [file.name]
        elif file.stem in images:
            listing.fault(shown(file), f"a second image named {file.stem!r} beside {images[file.stem].name}")
            unclear.add(owner(file.stem))
        else:
            images[file.stem] = file
    if ignored:
        names = ", ".join(map(shown, ignored[:5]))
        listing.notes.append(f"{shown(folder.path)}: {len(ignored)} entries are no images and are not used: {names}")
    return images


def _masks(targets: dict[str, Path], images: list[Path], listing: Listing, unclear: set[str]) -> dict[str, Path]:
    masks: dict[str, Path] = {}
    for path in images:
        base = masked_base(path.stem, targets)
        if base in masks:
            listing.fault(shown(path), f"a second mask of {base!r} beside {shown(masks[base])}")
            unclear.add(base)
        elif base is not None:
            masks[base] = path
    return masks


def _controls(
    targets: dict[str, Path], beside: dict[str, Path], listing: Listing, unclear: set[str]
) -> dict[str, tuple[Path, ...]]:
    """The controls of each target."""
    by_casefold = {base.casefold(): base for base in targets}
    numbered: dict[str, dict[int, Path]] = {}
    for stem, path in beside.items():
        further = further_control(stem)
        if stem in targets:
            numbered.setdefault(stem, {})[0] = path
        elif further and further[0] in targets:
            numbered.setdefault(further[0], {})[further[1]] = path
        elif masked_base(stem, targets) is None:
            listing.fault(shown(path), f"no target of that name in {TARGETS}/")
            meant = by_casefold.get(owner(stem).casefold())
            unclear |= {meant} if meant else set()
    controls = {}
    for base, by_number in numbered.items():
        last = by_number[max(by_number)]
        for number in sorted(set(range(len(by_number))) - set(by_number)):
            expected = f"{base}_control_{number}.*" if number else f"{base}.*"
            listing.fault(shown(last), f"control {number} is missing ({CONTROLS}/{shown(expected)})")
            unclear.add(base)
        controls[base] = tuple(by_number[number] for number in sorted(by_number))
    return controls


_PROMPT, _SECOND = 0, -1
"""Texts of a sample are kept by number: its prompt, a second one, and further captions from 1."""


def _texts(targets: dict[str, Path], folder: _Folder, listing: Listing) -> dict[str, dict[int, Path]]:
    """The files with what is said of each target."""
    texts: dict[str, dict[int, Path]] = {}
    for file in (file for file in folder.files if file.suffix.lower() == ".txt"):
        base, number = file.stem, _PROMPT
        if base not in targets:  # an image may be called like a caption; then this is its prompt
            caption = further_caption(file.stem)
            second = file.stem.removesuffix(PROMPT_2)
            if caption and caption[0] in targets:
                base, number = caption
            elif second != file.stem and second in targets:
                base, number = second, _SECOND
        if base not in targets:
            listing.fault(shown(file), "a prompt without an image")
        else:
            texts.setdefault(base, {})[number] = file
    return texts


def _wording(target: Path, texts: dict[int, Path], listing: Listing) -> Wording | None:
    """What is said of a target; nothing, and a fault, if that can't be told."""
    if _PROMPT not in texts:
        listing.fault(shown(target), f"no prompt {shown(target.stem)}.txt beside it")
        return None
    last = max(texts)
    missing = sorted(set(range(last + 1)) - set(texts))
    if missing:
        listing.fault(shown(texts[last]), f"caption {missing[0]} is missing ({target.stem}_caption_{missing[0]}.txt)")
        return None
    read = {number: _read(file, listing) for number, file in texts.items()}
    if any(text is None for text in read.values()):
        return None
    known = {number: text for number, text in read.items() if text is not None}
    captions = [known[number] for number in range(1, last + 1)]
    return worded([known[_PROMPT], *captions], known.get(_SECOND), shown(target), listing)


def _read(file: Path, listing: Listing) -> str | None:
    try:
        prompt = file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        listing.fault(shown(file), f"not UTF-8 text ({error.reason} at byte {error.start})")
        return None
    except OSError as error:
        listing.fault(shown(file), f"can't be read: {error.strerror}")
        return None
    if not prompt:
        listing.fault(shown(file), "the prompt is empty")
        return None
    return prompt
