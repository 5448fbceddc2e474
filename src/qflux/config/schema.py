"""The configuration as JSON Schema, for editors, and as a reference page: both from the fields themselves."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from qflux.config.root import Config
from qflux.config.section import Section

INTRODUCTION = """# Configuration reference

Every key of a config file, from the code itself (`qflux schema --reference`). `--set path.to.key=value` replaces a
value on the command line. For completion and checks in an editor with a YAML language server, write the schema once and
name it in the first line of a config:

```bash
qflux schema --output qflux.schema.json
```

```yaml
# yaml-language-server: $schema=qflux.schema.json
```
"""


_WORDS = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true, false",
    "Path": "path",
    "dict": "mapping",
}


def json_schema() -> dict[str, Any]:
    """What a YAML language server needs."""
    schema = Config.model_json_schema(mode="validation")
    for name, value in schema["properties"].items():
        if name not in schema["required"]:  # an empty section is its defaults
            schema["properties"][name] = {"anyOf": [value, {"type": "null"}]}
    for section in ("DataSettings", "ProcessorSettings"):  # the nesting of older configs
        older = {"class_path": {"type": "string"}, "init_args": {"type": "object"}}
        schema["$defs"][section]["properties"] |= older
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "qflux configuration",
    }


def reference() -> str:
    """The reference page, in Markdown."""
    parts = [INTRODUCTION, *_section("", Config)]
    return "\n".join(parts).rstrip() + "\n"


def _section(path: str, section: type[BaseModel]) -> Iterator[str]:
    """A section, and then those within it."""
    yield f"## {f'`{path}`' if path else 'Top level'}\n"
    if section.__doc__:
        yield f"{' '.join(section.__doc__.split())}\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        cells = (f"`{name}`", _cell(_named(field.annotation)), _default(field), _cell(field.description or ""))
        yield f"| {' | '.join(cells)} |"
    yield ""
    for name, field in section.model_fields.items():
        place = f"{path}.{name}" if path else name
        for inner in _sections_of(field):
            if not _is_source(inner):
                yield from _section(place, inner)
            elif place == "data.sources":  # the other lists take the same
                kind = get_args(inner.model_fields["type"].annotation)[0]
                yield from _section(f"data.sources[] of type {kind}", inner)


def _sections_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The sections that a field holds, also within lists and unions."""
    found: list[type[BaseModel]] = []

    def walk(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            found.append(annotation)
        for argument in get_args(annotation):
            walk(argument)

    walk(field.annotation)
    return list(dict.fromkeys(found))


def _is_source(section: type[BaseModel]) -> bool:
    return "type" in section.model_fields and "path" in section.model_fields


def _named(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        words = [f"`{value}`" for value in arguments]
    elif origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys("null" if a is type(None) else _named(a) for a in arguments))
    elif origin in (list, tuple):
        words = [f"list of {_named(arguments[0])}"]
    elif hasattr(annotation, "__metadata__"):
        words = [_named(arguments[0])]
    elif isinstance(annotation, type) and issubclass(annotation, Section):
        words = ["section"]
    else:
        words = [_WORDS.get(getattr(origin or annotation, "__name__", ""), str(annotation))]
    return ", ".join(words)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
