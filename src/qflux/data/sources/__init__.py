"""From the configured sources to samples. Nothing is opened here but tables and prompts.

1. each source is listed: `folder`, `tables` (CSV, JSONL) or `hub` (Hugging Face data sets)
2. its samples learn how often they train, and whether they are class images
"""

from __future__ import annotations

from dataclasses import replace

from qflux.config import CsvSource, FolderSource, HubSource, JsonlSource, Source
from qflux.data.sources.folder import read_folder
from qflux.data.sources.huggingface import read_hub
from qflux.data.sources.listing import Fault, ListedSample, Listing
from qflux.data.sources.tables import read_table

__all__ = ["Fault", "ListedSample", "Listing", "read_source"]


def read_source(source: Source, is_prior: bool = False) -> Listing:
    """A source's samples, with the rate and the role that the config gives them."""
    match source:
        case FolderSource():
            listing = read_folder(source.path)
        case CsvSource() | JsonlSource():
            listing = read_table(source)
        case HubSource():
            listing = read_hub(source)
        case _:
            raise TypeError(f"no reader for {type(source).__name__}")
    listing.samples = [
        replace(sample, source=listing.source, rate=source.rate, is_prior=is_prior) for sample in listing.samples
    ]
    return listing
