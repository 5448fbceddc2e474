"""A data set in register, and masks of what its pairs differ in: new files, beside originals that nobody touches."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops

from qflux.data.images.decode import ImageFile, load_mask, load_rgb, load_rgba
from qflux.data.images.index import in_parallel
from qflux.data.lint.registration import Registration, covered, loaded_pair, measured, registered
from qflux.data.sample import Sample, SampleImage
from qflux.data.sources.folder import CONTROLS, TARGETS
from qflux.data.sources.naming import CAPTION, CONTROL, MASK, PROMPT_2
from qflux.errors import DataError
from qflux.files.atomic import new_folder, write_bytes
from qflux.measures.colour import lab
from qflux.measures.edit import edited_region
from qflux.pictures.drawing import GridRow, edit_grid, write_png

SHOWN = 6
"""Pairs of the sheet."""
SHEET, LIST = "registration.png", "registration.jsonl"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Fixed:
    """What became of one sample."""

    name: str
    found: Registration | None
    """None where control and target can't be compared."""
    moved: bool
    problem: str = ""

    def line(self) -> dict[str, object]:
        values = {key: value for key, value in asdict(self).items() if value not in (None, "")}
        if self.found is not None:
            values["found"] = {key: np.round(value, 4).tolist() for key, value in asdict(self.found).items()}
        return values


def write_registered(samples: Sequence[Sample], folder: Path, progress: Progress | None = None) -> list[Fixed]:
    """Copies of all samples in qflux's folder layout, with those targets moved that are off their controls.

    A pair whose target was moved is cut to what both of them have; all others are copied as they are.
    """
    _require_new(folder)
    report = progress or (lambda stage, done, total: None)
    names = _file_names(samples)
    fixed: list[Fixed] = []
    with new_folder(folder) as staged:
        for each in in_parallel(lambda pair: _copied(*pair, staged), list(zip(samples, names, strict=True))):
            fixed.append(each)
            report("registering", len(fixed), len(samples))
        lines = "".join(json.dumps(each.line(), ensure_ascii=False) + "\n" for each in fixed)
        write_bytes(staged / LIST, lines.encode())
        sheet = _sheet(samples, fixed)
        if sheet is not None:
            write_png(staged / SHEET, sheet)
    return fixed


def write_masks(samples: Sequence[Sample], folder: Path, progress: Progress | None = None) -> int:
    """Masks of what control and target differ in, `<name>_mask.png`, for samples that have none; how many."""
    _require_new(folder)
    report = progress or (lambda stage, done, total: None)
    chosen = [(sample, name) for sample, name in zip(samples, _file_names(samples), strict=True) if not sample.has_mask]
    made = 0
    with new_folder(folder) as staged:
        for done, mask in enumerate(in_parallel(lambda pair: _difference_mask(pair[0]), chosen), 1):
            if mask is not None:
                write_png(staged / f"{chosen[done - 1][1]}{MASK}.png", mask)
                made += 1
            report("masks", done, len(chosen))
    return made


def _require_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is not empty", "give a folder that does not exist yet.")


def _file_names(samples: Sequence[Sample]) -> list[str]:
    """A file name for each sample, no two alike on any file system."""
    taken: set[str] = set()
    names = []
    for sample in samples:
        base = re.sub(r"[^\w.-]+", "_", sample.name).strip("._") or "sample"
        name, number = base, 1
        while name.lower() in taken:
            number += 1
            name = f"{base}-{number}"
        taken.add(name.lower())
        names.append(name)
    return names


def _copied(sample: Sample, name: str, root: Path) -> Fixed:
    images = sample.own_images
    (root / TARGETS).mkdir(exist_ok=True)
    (root / CONTROLS).mkdir(exist_ok=True)
    try:
        found = measured(sample)
        if found is not None and found.is_off:
            box = covered(images.target.facts.size, found)
            moved = registered(_loaded(images.target), found).crop(box)
            write_png(root / TARGETS / f"{name}.png", moved)
            write_png(root / CONTROLS / f"{name}.png", _loaded(images.controls[0]).crop(box))
            if images.mask is not None:
                mask = load_mask(images.mask).resize(images.target.facts.size, Image.Resampling.BILINEAR)
                write_png(root / CONTROLS / f"{name}{MASK}.png", registered(mask, found).crop(box))
        else:
            _copy(images.target, root / TARGETS / name)
            for control in images.controls[:1]:
                _copy(control, root / CONTROLS / name)
            if images.mask is not None:
                write_png(root / CONTROLS / f"{name}{MASK}.png", load_mask(images.mask))
        for number, control in enumerate(images.controls[1:], 1):
            _copy(control, root / CONTROLS / f"{name}{CONTROL}_{number}")
    except DataError as error:
        return Fixed(sample.name, None, moved=False, problem=error.problem)
    texts = {"": sample.prompt} | {f"{CAPTION}_{n}": text for n, text in enumerate(sample.further_captions, start=1)}
    if sample.prompt_2 is not None:
        texts[PROMPT_2] = sample.prompt_2
    for suffix, text in texts.items():
        write_bytes(root / TARGETS / f"{name}{suffix}.txt", f"{text}\n".encode())
    return Fixed(sample.name, found, moved=found is not None and found.is_off)


def _loaded(image: SampleImage) -> Image.Image:
    has_alpha = image.facts.mode in ("RGBA", "LA", "PA")
    return load_rgba(image.ref) if has_alpha else load_rgb(image.ref)


def _copy(image: SampleImage, stem: Path) -> None:
    if isinstance(image.ref, ImageFile):
        with image.ref.open() as stream:
            write_bytes(stem.with_name(stem.name + image.ref.path.suffix), stream.read())
    else:
        buffer = io.BytesIO()
        _loaded(image).save(buffer, "PNG")
        write_bytes(stem.with_name(stem.name + ".png"), buffer.getvalue())


def _difference_mask(sample: Sample) -> Image.Image | None:
    pair = loaded_pair(sample)
    if pair is None:
        return None
    control, target = pair
    region = edited_region(lab(control), lab(target), None)
    return None if region is None else Image.fromarray(region.astype(np.uint8) * 255)


def _sheet(samples: Sequence[Sample], fixed: Sequence[Fixed]) -> Image.Image | None:
    """The pairs that were furthest off: what differs between them before and after."""
    moved = [(sample, each.found) for sample, each in zip(samples, fixed, strict=True) if each.moved and each.found]
    moved.sort(key=lambda pair: -pair[1].reach(*pair[0].own_images.target.facts.size))
    rows = []
    for sample, found in moved[:SHOWN]:
        pair = loaded_pair(sample)
        assert pair is not None
        control, target = pair
        box = covered(target.size, found)
        after = registered(target, found)
        images = {"control": control, "before": _difference(control, target)}
        images["after"] = _difference(control.crop(box), after.crop(box))
        scale = min(1.0, 360 / max(control.size))
        shrunk = {title: _scaled(image, scale) for title, image in images.items()}
        where = f"{found.right:+.2f} px right, {found.down:+.2f} px down, zoom {found.zoom:.4f}"
        rows.append(GridRow(f"{sample.name}: {where}", shrunk))
    return edit_grid(rows, ["control", "before", "after"]) if rows else None


def _difference(first: Image.Image, second: Image.Image) -> Image.Image:
    """Where two images differ, four times as bright."""
    return ImageChops.difference(first, second).convert("L").point(lambda value: min(255, 4 * value)).convert("RGB")


def _scaled(image: Image.Image, scale: float) -> Image.Image:
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
