"""From the configured sources to samples. Nothing is opened here but tables and prompts.

1. each source is listed: `folder`, `tables` (CSV, JSONL) or `huggingface`
2. what somebody has corrected about it is applied
3. its samples learn how often they train, and whether they are class images
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qflux.config import Source
from qflux.data.sources.corrections import correct
from qflux.data.sources.folder import read_folder
from qflux.data.sources.huggingface import read_hub
from qflux.data.sources.listing import Listing
from qflux.data.sources.tables import read_table

READERS: dict[str, Callable[[Any], Listing]] = {
    "folder": lambda source: read_folder(source.path),
    "csv": read_table,
    "jsonl": read_table,
    "huggingface": read_hub,
}
"""ADD A DATA SOURCE HERE: what lists it, by the type that its section in `config/data.py` has."""


def read_source(source: Source, is_prior: bool = False) -> Listing:
    """A source's samples, with the rate and the role that the config gives them."""
    listing = READERS[source.type](source)
    if source.corrections is not None:
        listing = correct(listing, source.corrections)
    listing.samples = [
        replace(sample, source=listing.source, rate=source.rate, is_prior=is_prior) for sample in listing.samples
    ]
    return listing
