"""HTML that can't be broken by what is put into it: everything is escaped unless it is `Html` already."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Html(str):
    """Text that is HTML. Only `tag` and `join` make it from other text."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element. A trailing underscore of an attribute's name is dropped, others become dashes; None leaves it out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in ("img", "input", "meta", "br"):
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[Any]) -> Html:
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part)) for part in parts))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Html:
    """A table; the first cell of a row is its title."""
    titles = [tag("tr", *(tag("th", cell) for cell in head))] if head else []
    body = (tag("tr", tag("th", row[0]), *(tag("td", cell) for cell in row[1:])) for row in rows)
    return tag("table", *titles, *body)


def facts(values: Mapping[str, Any]) -> Html:
    """Names and values below each other."""
    return table((), values.items())
