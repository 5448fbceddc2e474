"""Folders and tables of pairs with faults that people have, and some that only machines have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from planted import bomb_png, deep_png, scene, write_pair
from torture.attacks.damage import odd_value, spoiled
from torture.attacks.jobs import written
from torture.cases import Case, Wrong

PLACES = ("training_images", "control_images")


def folder(case: Case) -> None:
    """Pairs of which some are spoiled. Left out and named, or refused and named, as the config says."""
    draw, data = case.random, case.folder / "data"
    names = [f"pair_{number}" for number in range(draw.randint(2, 5))]
    for number, name in enumerate(names):
        write_pair(data, name, draw.randrange(1000), draw.choice(((96, 80), (64, 64), (130, 70))))
        if number and draw.random() < 0.3:
            scene(number, (64, 64)).save(data / "control_images" / f"{name}_control_1.png")
    bad: dict[str, str] = {}
    changed = draw.sample(names, draw.randint(0, len(names) - 1))
    for name in changed:
        kind = draw.choice([*FAULTS, *ODD])
        case.note(f"{name}: {kind}")
        {**FAULTS, **ODD}[kind](case, data, name)
        if kind in FAULTS:
            bad[name] = kind
    skips = draw.random() < 0.5
    source = {"path": str(data), "on_bad_sample": "skip" if skips else "error", "held_out": None}
    config = case.ground.config(case.folder, data=source, cache={"path": str(case.folder / "cache")})
    outcome = case.require(case.run("cache", "--config", config))
    told = outcome.out + outcome.err
    if bad and not skips and outcome.code == 0:
        raise Wrong(f"{bad} are fine, it says\n{outcome.told}")
    said = told.replace("\n", "")
    silent = [name for name in bad if name not in said]
    if silent if skips else bad and not any(name in said for name in changed):  # it may be refused at the first of them
        raise Wrong(f"{silent} of {bad} are not named\n{outcome.told}")
    inspected = case.folder / "inspected.json"
    case.require(case.run("inspect", "--config", config, "--json", inspected, "--output", case.folder / "looked"))
    if inspected.exists():
        json.loads(inspected.read_text())
    case.require_clean(case.folder)


def _bytes_of(data: bytes) -> Callable[[Case, Path, str], None]:
    return lambda case, data_, name: _file(case, data_, name).write_bytes(data)


def _file(case: Case, data: Path, name: str) -> Path:
    return data / case.random.choice(PLACES) / f"{name}.png"


def _cut(case: Case, data: Path, name: str) -> None:
    file = _file(case, data, name)
    content = file.read_bytes()
    file.write_bytes(content[: case.random.randint(1, int(len(content) * 0.6))])


def _words(text: bytes | None) -> Callable[[Case, Path, str], None]:
    def change(case: Case, data: Path, name: str) -> None:
        file = data / "training_images" / f"{name}.txt"
        if text is None:
            file.unlink()
        else:
            file.write_bytes(text)

    return change


def _folder_instead(case: Case, data: Path, name: str) -> None:
    file = _file(case, data, name)
    file.unlink()
    file.mkdir()


def _mask(case: Case, data: Path, name: str) -> None:
    Image.new("L", (17, 23), 255).save(data / "control_images" / f"{name}_mask.png")


def _loop(case: Case, data: Path, name: str) -> None:
    file = _file(case, data, name)
    file.unlink()
    file.symlink_to(file)


def _long(case: Case, data: Path, name: str) -> None:
    write_pair(data, name, 1, (700, 40))


def _mode(mode: str) -> Callable[[Case, Path, str], None]:
    def change(case: Case, data: Path, name: str) -> None:
        file = _file(case, data, name)
        image = Image.open(file).convert(mode)
        file.unlink()
        image.save(file.with_suffix(".jpg" if mode == "CMYK" else ".png"))

    return change


def _spoiled(case: Case, data: Path, name: str) -> None:
    file = case.random.choice([*data.rglob(f"{name}*")])
    if file.is_file():
        file.write_bytes(spoiled(file.read_bytes(), case.random)[0])


def _deep(case: Case, data: Path, name: str) -> None:
    with Image.open(file := _file(case, data, name)) as image:
        size = image.size
    file.write_bytes(deep_png(*size))


FAULTS: dict[str, Callable[[Case, Path, str], None]] = {
    "text in a picture": _bytes_of(b"this is no picture"),
    "empty": _bytes_of(b""),
    "bomb": _bytes_of(bomb_png()),
    "cut": _cut,
    "no prompt": _words(None),
    "empty prompt": _words(b" \n\t"),
    "too long a prompt": _words(b"very " * 3000),
    "a link to itself": _loop,
    "a mask of another size": _mask,
    "too long": _long,
}
"""What must be named."""
ODD: dict[str, Callable[[Case, Path, str], None]] = {
    "grey": _mode("L"), "palette": _mode("P"), "alpha": _mode("RGBA"), "CMYK": _mode("CMYK"), "16 bits": _deep,
    "bytes in a prompt": _words(b"\xff\xfe\x00bad \x80\x81"), "controls in a prompt": _words(b"a\x00b\x1b[31mred\r\n"),
    "a mark in a prompt": _words(b"\xef\xbb\xbfmake it snow"), "spoiled": _spoiled, "a folder": _folder_instead,
}  # fmt: skip
"""What may be fine, or not."""


def table(case: Case) -> None:
    """A table of pairs with a cell changed, or its text spoiled."""
    draw = case.random
    images = sorted((case.ground.root / "data" / "control_images").glob("scene_*.png"))
    rows: list[dict[str, Any]] = [
        {"image": str(image), "control": str(draw.choice(images)), "prompt": f"edit {number}"}
        for number, image in enumerate(images[: draw.randint(1, 5)])
    ]
    if draw.random() < 0.6:
        row = draw.choice(rows)
        key = draw.choice([*row, "mask", "weight", "", "x" * 300])
        row[key] = odd_value(draw)
        case.note(f"{key[:20]}: {row[key]!r:.200}")
    form = draw.choice(("csv", "jsonl", "json", "tsv"))
    data = written(rows, form)
    if draw.random() < 0.5:
        data, kind = spoiled(data, draw)
        case.note(kind)
    file = case.folder / f"table.{form}"
    file.write_bytes(data)
    case.note(repr(data[:600]))
    config = case.ground.config(case.folder, data={"path": str(file), "held_out": None})
    case.require(case.run("inspect", "--config", config, "--output", case.folder / "looked"))
    case.require(case.run(draw.choice(("check", "cache")), "--config", config, "--set",
                          f"cache.path={case.folder / 'cache'}"))  # fmt: skip
