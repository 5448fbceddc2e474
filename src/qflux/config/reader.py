"""From YAML to a `Config`: overrides, older nestings, and every problem reported at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from qflux.config.data import SOURCES
from qflux.config.root import Config
from qflux.errors import LONGEST, ConfigError, collected, cut

_REFERENCE = "what every key takes: docs/reference.md, or qflux schema --reference."


_MOST_BYTES = 1 << 20
_MOST_VALUES = 100_000
"""A config has a few hundred values. References within references can stand for billions, in under a kilobyte."""
_SHOWN = 100
"""Problems that are worked out; the others are only counted."""


_ALSO = {"loss.kind": "use_mask_loss", "loss.use_mask_loss": "kind"}
"""Settings with a second spelling in the same section."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as a string; a learning rate is a number. A key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str):
                if key in seen:
                    line = node.start_mark.line + 1
                    raise yaml.YAMLError(f"the key {cut(key)} stands twice in one section, at line {line}")
                seen.add(key)
        return super().construct_mapping(node, deep)


FLOAT = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
"""What is a number here besides what YAML 1.1 takes for one."""
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """The values of a YAML text; anything wrong with it is a `ValueError`."""
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has {len(text):,} characters; a config has a few thousand")
    try:
        values = yaml.load(text, Loader=_Loader)
    except Exception as error:  # a tag without a meaning, a date that is none, too many digits or brackets: all differ
        problem = str(error) if isinstance(error, yaml.YAMLError | ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(problem[:600]) from None
    _require_small(values)
    return values


def _require_small(values: Any) -> None:
    """An error if references make a text stand for more than anybody would write, or for itself."""
    waiting, count = [values], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
        if count + len(waiting) > _MOST_VALUES:
            raise ValueError(f"it stands for more than {_MOST_VALUES:,} values; write out what its references mean")


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A validated config from a YAML file or a mapping, with `path.to.key=value` overrides applied."""
    values = read_yaml(Path(source)) if isinstance(source, str | Path) else _copy(source)
    if is_original(values):
        name = source if isinstance(source, str | Path) else "OLD.yaml"
        raise ConfigError(f"{name} is a config of the original qflux", f"convert it: qflux import-config {name}")
    unwrapping = [
        *_unwrap(values, ("data",), ("ImageDataset", "ImageEditDataset")),
        *_unwrap(values, ("data", "processor"), ("ImageProcessor",)),
    ]
    for override in overrides:
        _override(values, override)
    known = Config.model_fields
    values = {key: value for key, value in values.items() if value is not None or key not in known}  # empty: defaults
    problems = unwrapping
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        problems = [*unwrapping, *dict.fromkeys(_explain(problem) for problem in found[:_SHOWN])]
        problems += [""] * (len(found) - _SHOWN)  # counted, never shown
    if problems:
        name = f" {source}" if isinstance(source, str | Path) else ""
        raise collected(ConfigError, f"the configuration{name} is not valid", problems, _REFERENCE)
    return config.completed()


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a YAML file, as they stand there."""
    if not path.is_file():
        raise ConfigError(f"no config file at {path}", "check the path; recipes/ holds one for each family.")
    try:
        if path.stat().st_size > 4 * _MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; a config has a few thousand")
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a mapping of sections", "start from a recipe.")
    return values


def is_original(values: Mapping[str, Any]) -> bool:
    """A config that was written for the original qflux."""
    model = values.get("model")
    names = ("pretrained_model_name_or_path", "pretrained_model_path", "lora")
    inside = isinstance(model, Mapping) and any(name in model for name in names)
    return "family" not in values and ("trainer" in values or inside)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _unwrap(values: dict[str, Any], path: tuple[str, ...], classes: tuple[str, ...]) -> list[str]:
    """Lift `init_args` of the section at `path` into the section; its `class_path` must name what it becomes here.

    Returns what is wrong with it.
    """
    node: Any = values
    for key in path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    section = node.get(path[-1]) if isinstance(node, dict) else None
    if not isinstance(section, dict):
        return []
    name, problems = ".".join(path), []
    class_path = section.pop("class_path", None)
    if class_path is not None and str(class_path).rsplit(".", 1)[-1] not in classes:
        problems.append(
            f"{name}.class_path: {cut(class_path)} is not in qflux; remove it, or use {' or '.join(classes)}"
        )
    inner = section.pop("init_args", None) or {}
    if not isinstance(inner, dict):
        return [*problems, f"{name}.init_args: {cut(inner)} is not right: a mapping is required"]
    problems += [f"{name}.{key}: set both directly and under init_args" for key in inner if key in section]
    section.update(inner)
    return problems


def _override(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"--set {cut(override)} is not of the form path.to.key=value", "for example train.num_epochs=3."
        )
    node = values
    for depth, key in enumerate(keys[:-1]):
        if node.get(key) is None:  # absent, or a section that is switched off
            node[key] = {}
        child = node[key]
        if not isinstance(child, dict):
            raise ConfigError(f"--set {cut(override)}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        node = child
    node.pop(_ALSO.get(".".join(keys), ""), None)  # what is said last holds
    try:
        node[keys[-1]] = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"--set {cut(override)}: the value is not valid YAML: {error}") from None


def _explain(problem: Any) -> str:
    """One validation problem as: path, value, what would be right."""
    location = [part for i, part in enumerate(problem["loc"]) if not _is_union_tag(problem["loc"], i)]
    path = ".".join(str(part)[:LONGEST] for part in location)
    if problem["type"] == "extra_forbidden":
        *parents, key = location
        known = _known_keys(problem["loc"][:-1])
        nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        suggestion = ".".join(map(str, [*parents, *nearest]))
        return f"{path}: unknown key; " + (
            f"did you mean {suggestion}?" if nearest else f"known here: {', '.join(known)}"
        )
    if problem["type"] == "missing":
        return f"{path}: missing; a value is required"
    if problem["type"] == "union_tag_invalid":
        return f"{path}.type: {cut(problem['ctx']['tag'])} is not right: use one of {problem['ctx']['expected_tags']}"
    reason = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem["input"], dict):  # settings that do not go together; the reason names them
        return f"{path}: {reason}" if path else reason
    return f"{path}: {cut(problem['input'])} is not right: {reason}"


def _is_union_tag(location: Sequence[Any], index: int) -> bool:
    """pydantic names the alternative of a union in the path; a user never wrote that."""
    part = location[index]
    if not isinstance(part, str):
        return False
    chosen = index > 0 and isinstance(location[index - 1], int) and part in SOURCES
    return chosen or bool(re.search(r"^(list|tuple|dict)\[|^int$|^function-", part))


def _known_keys(location: Sequence[Any]) -> list[str]:
    section: type[BaseModel] = Config
    for index, part in enumerate(location):
        if _is_union_tag(location, index):
            section = SOURCES.get(part, section)
        elif part in section.model_fields:
            section = next(_sections(section.model_fields[part].annotation), section)
    return sorted(section.model_fields)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field's type speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
