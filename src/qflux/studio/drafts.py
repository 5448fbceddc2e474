"""Configs as text with comments, and as fields of a form: either may be changed, and the other follows.

A value is replaced where it stands in the text, so that comments and order stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qflux.config import Config, load_config
from qflux.config.reader import parse_yaml
from qflux.errors import ConfigError, DataError
from qflux.studio.workspace import Workspace

CODE = ("torch.optim.", "bitsandbytes.optim.", "prodigyopt.", "torchao.optim.", "qflux.")
"""Where classes may come from that a config of the studio names."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a config, and where."""

    path: str
    message: str
    line: int | None = None


def fields_of(text: str) -> dict[str, Any]:
    """Every value of a config by its path; nothing if it is no YAML."""
    try:
        return dict(_leaves(parse_yaml(text)))
    except (ValueError, yaml.YAMLError):
        return {}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def with_value(text: str, path: str, value: Any) -> str:
    """The text with a value at a path; null takes the line out, and a section that is not there is added.

    YAML can be written in ways that a change of a line does not fit; then nothing is changed.
    """
    if not re.fullmatch(r"\w+(\.\w+)*", path):
        raise DataError(f"{path!r} is no setting")
    before = fields_of(text)
    changed = _changed(text, path, value)
    after = fields_of(changed)
    meant = {key: known for key, known in before.items() if key != path and not key.startswith(f"{path}.")}
    is_right = after.pop(path, None) == value or isinstance(value, dict)
    kept = {key: known for key, known in after.items() if not key.startswith(f"{path}.")}
    if not is_right or _without_empty(kept) != _without_empty(meant):
        raise ConfigError(f"{path} can't be changed in this text", "change it there by hand.")
    return changed


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _changed(text: str, path: str, value: Any) -> str:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"this is no YAML: {str(error).splitlines()[0]}", "fix the text first.") from None
    written = json.dumps(value, ensure_ascii=False)
    if not isinstance(root, yaml.MappingNode):
        return text if value is None else _nested(path.split("."), written, "")
    node, parts = root, path.split(".")
    for depth, part in enumerate(parts):
        pair = next((pair for pair in node.value if pair[0].value == part), None)
        is_last = depth == len(parts) - 1
        if pair is None:
            return text if value is None else _inserted(text, node, root, parts[depth:], written)
        key, found = pair
        if is_last and value is None:
            if depth and len(node.value) == 1:  # a section of nothing would be null
                return _changed(text, ".".join(parts[:depth]), None)
            lines = text.splitlines(keepends=True)
            del lines[key.start_mark.line : max(key.start_mark.line, _end_line(found)) + 1]
            return "".join(lines)
        if is_last or not isinstance(found, yaml.MappingNode) or found.flow_style:
            if not is_last:
                written = json.dumps(_merged(found, text, parts[depth + 1 :], value), ensure_ascii=False)
            start, end = found.start_mark.index, found.end_mark.index
            if not isinstance(found, yaml.ScalarNode) and not found.flow_style:  # a block: its lines go
                end = len(text[:end].rstrip())
            space = "" if text[start - 1 : start].isspace() or start == 0 else " "
            return text[:start] + space + written + text[end:]
        node = found
    return text


def _end_line(node: yaml.Node) -> int:
    """The last line that a value stands on."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        # A block ends, for the parser, where the next thing begins.
        parts = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in node.value]
        return max(map(_end_line, parts))
    end = node.end_mark
    return end.line - 1 if end.column == 0 and end.line > node.start_mark.line else end.line


def _merged(node: yaml.Node, text: str, parts: list[str], value: Any) -> Any:
    """What stands in one line as a mapping, with a value in it."""
    found = parse_yaml(text[node.start_mark.index : node.end_mark.index])
    inner = found = found if isinstance(found, dict) else {}
    for part in parts[:-1]:
        inner = inner.setdefault(part, {})
    if value is None:
        inner.pop(parts[-1], None)
    else:
        inner[parts[-1]] = value
    return found


def _inserted(text: str, node: yaml.MappingNode, root: yaml.MappingNode, parts: list[str], written: str) -> str:
    """Behind the last line of a section, at its indentation."""
    indent = " " * (node.value[0][0].start_mark.column if node.value else 0)
    lines = text.splitlines(keepends=True)
    if node is root:
        before = text if text.endswith("\n") or not text else text + "\n"
        return before + _nested(parts, written, "")
    at = max(_end_line(value) for _, value in node.value) + 1
    if at > 0 and lines and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    lines.insert(at, _nested(parts, written, indent))
    return "".join(lines)


def _nested(parts: list[str], written: str, indent: str) -> str:
    lines = [f"{indent}{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
    return "\n".join(lines) + f" {written}\n"


def checked(text: str, workspace: Workspace) -> tuple[Config | None, list[Problem]]:
    """A config that may be run here, or what is wrong with it, each problem with its place in the text."""
    try:
        values = parse_yaml(text)
        config = load_config(values if isinstance(values, dict) else {})
    except (ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        return None, [Problem("", str(error).split("\n")[0], mark.line + 1 if mark else None)]
    except ConfigError as error:
        return None, _problems(error, text)
    outside = list(_outside(config, workspace))
    return (None, [Problem(p, m, line_of(text, p)) for p, m in outside]) if outside else (config, [])


def _problems(error: ConfigError, text: str) -> list[Problem]:
    found = []
    for line in error.problem.splitlines()[1:] or [error.problem]:
        message = line.strip().removeprefix("- ")
        path, colon, rest = message.partition(": ")
        is_path = bool(colon) and re.fullmatch(r"[\w.\[\]]+", path) is not None
        where = re.sub(r"\[\d+\]", "", path) if is_path else ""
        found.append(Problem(where, rest if is_path else message, line_of(text, where)))
    return found


def line_of(text: str, path: str) -> int | None:
    """The line of a setting, or of the innermost section there is."""
    try:
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    line = None
    for part in path.split(".") if path else []:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        pair = next((pair for pair in pairs if pair[0].value == part), None)
        if pair is None:
            break
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


def _outside(config: Config, workspace: Workspace) -> Iterator[tuple[str, str]]:
    """What a config of this page may not do: leave the folder, or run somebody's code."""
    for path, value in _leaves_of(config):
        if isinstance(value, Path):
            is_hub = path.startswith("data.") and path.endswith("path") and not (workspace.root / value).exists()
            try:
                if not is_hub or value.is_absolute() or ".." in value.parts:
                    workspace.inside(value)
            except DataError as error:
                yield path, error.problem
        elif path.endswith("class_path") and isinstance(value, str) and not value.startswith(CODE):
            yield path, f"{value} is not run from here; in a terminal, `qflux fit` takes it"


def _leaves_of(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if hasattr(type(section), "model_fields"):
        for name in type(section).model_fields:
            yield from _leaves_of(getattr(section, name), f"{path}.{name}" if path else name)
    elif isinstance(section, list | tuple):
        for item in section:
            yield from _leaves_of(item, path)
    else:
        yield path, section
