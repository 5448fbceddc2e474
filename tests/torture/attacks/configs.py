"""Configs: every recipe with something changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from torture.attacks.damage import odd_value, spoiled
from torture.cases import Case, Wrong, forked

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{','.join(f'*{before}' for _ in range(9))}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = (
    "\t", "---\n---\n", "!!python/object/apply:os.system ['true']\n", "!!binary x\n", "? [a]\n: b\n", "<<: *x\n",
    "%YAML 9.9\n---\n", "\ufeff", "\x00", "- a\n", "key: [\n", "key: 'x\n", "&a [*a]\n", "\u2028", "data: 1\ndata: 2\n",
    "2026-01-01\n", BOMB,
)  # fmt: skip
"""Lines that YAML has its own ideas about."""


def recipe(case: Case) -> None:
    """A recipe with one value changed, one key added or one left out: it loads, or the error names that place."""
    draw = case.random
    settings = yaml.safe_load(draw.choice(RECIPES).read_text())
    path = draw.choice(list(_paths(settings)))
    section, leaf = _section(settings, path[:-1]), path[-1]
    kinds = ["value", "value", "value", "gone", "two"]
    if isinstance(section, dict) and "init_args" not in path:  # what a class takes is its own affair
        kinds += ["unknown", "unknown"]
    kind = draw.choice(kinds)
    names: tuple[str, ...] = tuple(map(str, path))
    if kind == "unknown":
        name = str(leaf) + draw.choice("xyz_")
        section[name] = draw.choice((1, "x", None, section[leaf]))
        names = (name,)
    elif kind == "gone":
        del section[leaf]
        names = ()
    else:
        section[leaf] = odd_value(draw)
        if kind == "two":
            other = draw.choice(list(_paths(settings)))
            _section(settings, other[:-1])[other[-1]] = odd_value(draw)
            names = ()
    case.note(f"{kind} at {'.'.join(map(str, path))}: {settings!r:.2000}")

    def load() -> None:
        found = _loaded(case, settings, names)
        if kind == "unknown" and found is not None:
            raise Wrong(f"{names[0]} is no setting, and nobody says so")
        if found is not None:
            _require_same_again(found)

    _do(case, load)


def text(case: Case) -> None:
    """The text of a recipe with something spoiled."""
    draw, file = case.random, case.folder / "spoiled.yaml"
    original = draw.choice(RECIPES).read_bytes()
    if draw.random() < 0.5:
        data, kind = spoiled(original, draw)
    else:
        lines = original.splitlines(keepends=True)
        kind = draw.choice(TEXTS)
        lines.insert(draw.randrange(len(lines) + 1), kind.encode("utf-8", "surrogatepass"))
        data = b"".join(lines)
        if draw.random() < 0.1:
            data, kind = data.decode("utf-8", "replace").encode("utf-16"), "UTF-16"
    file.write_bytes(data)
    case.note(f"{kind!r:.100}")

    def load() -> None:
        found = _loaded(case, file, (file.name, "problem"))
        if found is not None:
            _require_same_again(found)

    _do(case, load)


def checked(case: Case) -> None:
    """`qflux check` and `inspect` with a value changed; what they look at is there."""
    draw = case.random
    settings = case.ground.settings(case.folder)
    path = draw.choice([path for path in _paths(settings) if path[0] not in ("output_dir",)])
    _section(settings, path[:-1])[path[-1]] = odd_value(draw)
    file = case.folder / "checked.yaml"
    file.write_text(yaml.safe_dump(settings, allow_unicode=True))
    case.note(f"{'.'.join(map(str, path))}: {_section(settings, path[:-1])[path[-1]]!r:.200}")
    case.require(case.run(draw.choice(("check", "check", "inspect")), "--config", file))


def _do(case: Case, load: Any) -> None:
    outcome = forked(load, case.folder)
    if outcome.code != 0:
        raise Wrong(outcome.told)
    case.require(outcome, (0,))


def _loaded(case: Case, settings: Any, names: tuple[str, ...]) -> Any:
    from qflux.config import load_config
    from qflux.errors import QfluxError

    try:
        return load_config(settings)
    except QfluxError as error:
        case.require_message(str(error), names)
        return None


def _require_same_again(config: Any) -> None:
    """What a config says of itself is the same config."""
    from qflux.config import load_config

    dumped = config.dump()
    again = load_config(yaml.safe_load(yaml.safe_dump(dumped))).dump()
    if not _equal(again, dumped):
        raise Wrong(f"a config is not what it says of itself: {_difference(again, dumped)}")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _difference(one: Any, other: Any, path: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        return "".join(_difference(one.get(key), other.get(key), f"{path}.{key}") for key in one.keys() | other.keys())
    return "" if _equal(one, other) else f" {path}: {one!r:.100} / {other!r:.100}"


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _section(settings: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        settings = settings[key]
    return settings
