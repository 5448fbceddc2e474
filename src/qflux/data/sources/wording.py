"""What is said of a sample: one prompt, several wordings of it, or one prompt for each of two text encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qflux.config import HubColumns, TableColumns
from qflux.data.sources.listing import ListedSample, Listing


@dataclass(frozen=True)
class Wording:
    """What a source says of a sample."""

    prompt: str
    prompt_2: str | None = None
    """What a second text encoder reads instead."""
    further: tuple[str, ...] = ()
    """Other wordings of the prompt."""

    def put_into(self, sample: ListedSample) -> ListedSample:
        return replace(sample, prompt=self.prompt, prompt_2=self.prompt_2, further_captions=self.further)


def worded(captions: Sequence[str], second: str | None, what: str, listing: Listing) -> Wording | None:
    """The wording of a sample; nothing, and a fault, if it has several captions and a second prompt as well."""
    prompt, *further = captions
    if second is not None and further:
        problem = f"{len(captions)} captions and a second prompt: it can't be told which of them that belongs to"
        listing.fault(what, problem, "give it several captions, or one and a second prompt.")
        return None
    return Wording(prompt, second, tuple(further))


def read_wording(
    row: Mapping[str, object], columns: TableColumns | HubColumns, place: str, listing: Listing
) -> Wording | None:
    """The wording in a row of a table; nothing, and a fault, if there is something wrong with it."""
    try:
        captions = _texts(row, columns.prompt)
        if not captions:
            raise ValueError(f"{columns.prompt} is empty")
        for column in columns.captions or ():
            captions += _texts(row, column)
        second = _texts(row, columns.prompt_2, may_be_list=False) if columns.prompt_2 else []
    except ValueError as error:
        listing.fault(place, str(error))
        return None
    return worded(captions, second[0] if second else None, place, listing)


def _texts(row: Mapping[str, object], column: str, may_be_list: bool = True) -> list[str]:
    """What a cell says, without what is empty; a `ValueError` if it is something else than text."""
    value = row.get(column)
    found = []
    for text in value if isinstance(value, list) and may_be_list else [value]:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{column} is {value!r}, not text")
        if text and not is_text(text):
            raise ValueError(f"{column} holds half a character (a lone surrogate)")
        found += [text.strip()] if text and text.strip() else []
    return found


def is_text(value: str) -> bool:
    """It can be written as UTF-8; JSON can say things that can't."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
