"""Where samples come from. A source lists `EditExample`s; no image is opened here.

The folder layout:

    training_images/<base>.png            the target
    training_images/<base>.txt            the prompt
    control_images/<base>.png             the first control, aligned with the target
    control_images/<base>_control_1.png   further controls, counted from 1
    …_images/<base>_mask.png              the edited region, white; in either folder
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qflux.data.images import SUFFIXES
from qflux.errors import DataError, collected

logger = logging.getLogger(__name__)

TARGETS, CONTROLS = "training_images", "control_images"


@dataclass(frozen=True)
class EditExample:
    """One sample as files: what the target should become of the controls, and how to say it."""

    name: str
    target: Path
    prompt: str
    controls: tuple[Path, ...] = ()
    mask: Path | None = None


def read_folder(root: Path) -> list[EditExample]:
    """All samples of a folder, sorted by name. Every fault in it is reported, not only the first."""
    targets_dir, controls_dir = root / TARGETS, root / CONTROLS
    if not targets_dir.is_dir():
        raise DataError(f"no folder {targets_dir}", f"data.path must hold {TARGETS}/ (and {CONTROLS}/ for edits).")
    problems: list[str] = []
    listed = _by_stem(targets_dir, problems)
    beside = _by_stem(controls_dir, problems) if controls_dir.is_dir() else {}
    if not controls_dir.is_dir():
        logger.warning("there is no folder %s: the samples have no control images", controls_dir)
    targets = {stem: path for stem, path in listed.items() if _mask_base(stem, listed) is None}
    masks = _masks(targets, [*listed.values(), *beside.values()], problems)
    controls = _controls(targets, beside, problems)
    prompts = {file.stem: file for file in _files(targets_dir) if file.suffix.lower() == ".txt"}
    problems += [f"{prompts[base]}: a prompt without an image" for base in sorted(prompts.keys() - targets.keys())]

    examples = []
    for base, target in sorted(targets.items()):
        prompt = _prompt(base, target, prompts, problems)
        if prompt is not None:
            examples.append(EditExample(base, target, prompt, controls.get(base, ()), masks.get(base)))
    without = [example.name for example in examples if not example.controls]
    if controls and without:
        names = ", ".join(without[:10])
        logger.warning("%d of %d samples have no control image: %s", len(without), len(examples), names)
    if problems:
        raise collected(DataError, f"the data in {root} is not complete", problems)
    if not examples:
        raise DataError(f"no usable sample in {root}", f"put images and their .txt prompts into {targets_dir}.")
    return examples


def _files(folder: Path) -> Iterable[Path]:
    """All files, and links to files that are not there: those must not vanish without a word."""
    return (f for f in sorted(folder.iterdir()) if (f.is_file() or f.is_symlink()) and not f.name.startswith("."))


def _by_stem(folder: Path, problems: list[str]) -> dict[str, Path]:
    """Images by file name without suffix; two images of one name are ambiguous."""
    images: dict[str, Path] = {}
    ignored = [f"{path.name}/" for path in sorted(folder.iterdir()) if path.is_dir()]
    for file in _files(folder):
        if not file.exists():
            problems.append(f"{file}: a link to a file that does not exist")
        elif file.suffix.lower() not in SUFFIXES:
            ignored += [] if file.suffix.lower() == ".txt" and folder.name == TARGETS else [file.name]
        elif file.stem in images:
            problems.append(f"{file}: a second image named {file.stem!r} beside {images[file.stem].name}")
        else:
            images[file.stem] = file
    if ignored:
        logger.warning(
            "%s: %d entries are no images and are not used: %s", folder, len(ignored), ", ".join(ignored[:5])
        )
    return images


def _mask_base(stem: str, targets: Iterable[str]) -> str | None:
    """The target that an image named `stem` is the mask of, if any."""
    base = stem.removesuffix("_mask")
    return base if base != stem and base in targets else None


def _masks(targets: dict[str, Path], images: list[Path], problems: list[str]) -> dict[str, Path]:
    masks: dict[str, Path] = {}
    for path in images:
        base = _mask_base(path.stem, targets)
        if base in masks:
            problems.append(f"{path}: a second mask of {base!r} beside {masks[base]}")
        elif base is not None:
            masks[base] = path
    return masks


def _controls(targets: dict[str, Path], beside: dict[str, Path], problems: list[str]) -> dict[str, tuple[Path, ...]]:
    numbered: dict[str, dict[int, Path]] = {}
    for stem, path in beside.items():
        further = re.fullmatch(r"(.+)_control_([1-9]\d*)", stem)
        if stem in targets:
            numbered.setdefault(stem, {})[0] = path
        elif further and further[1] in targets:
            numbered.setdefault(further[1], {})[int(further[2])] = path
        elif _mask_base(stem, targets) is None:
            problems.append(f"{path}: no target of that name in {TARGETS}/")
    controls = {}
    for base, by_number in numbered.items():
        missing = sorted(set(range(max(by_number) + 1)) - set(by_number))
        for number in missing:
            expected = f"{base}_control_{number}.*" if number else f"{base}.*"
            problems.append(f"{by_number[max(by_number)]}: control {number} is missing ({CONTROLS}/{expected})")
        controls[base] = tuple(by_number[number] for number in sorted(by_number))
    return controls


def _prompt(base: str, target: Path, prompts: dict[str, Path], problems: list[str]) -> str | None:
    if base not in prompts:
        problems.append(f"{target}: no prompt {base}.txt beside it")
        return None
    try:
        prompt = prompts[base].read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        problems.append(f"{prompts[base]}: not UTF-8 text ({error.reason} at byte {error.start})")
        return None
    if not prompt:
        problems.append(f"{prompts[base]}: the prompt is empty")
        return None
    return prompt
