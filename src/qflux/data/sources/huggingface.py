"""Samples in a Hugging Face data set: images as bytes in a table, or as paths.

The table is read through Arrow, so that listing it touches prompts and counts but no image.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qflux.config import HubSource
from qflux.data.images.decode import ByteStream, ImageFile, ImageRef, shown
from qflux.data.sources.listing import ListedSample, Listing, note_controls, require_columns, told_apart
from qflux.data.sources.wording import read_wording
from qflux.errors import DataError
from qflux.files.hashing import key_of

_BATCH = 1000


@dataclass(frozen=True)
class ImageCell:
    """An image in a row of a data set."""

    name: str
    row: int
    column: str
    item: int | None
    """Its place in a list of images."""
    table: Any = field(compare=False, repr=False)
    version: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)
    """What changes with the files behind the table."""
    file: str | None = field(default=None, compare=False)
    """What the image was called before it went into the table, if that is known."""

    def open(self) -> ByteStream:
        value = self.table[self.row].column(self.column)[0].as_py()
        value = value if self.item is None else value[self.item]
        data = value if isinstance(value, bytes) else (value or {}).get("bytes")
        if data is None:
            raise OSError(f"the cell holds {'nothing' if value is None else 'no image bytes'}")
        return io.BytesIO(data)

    def stamp(self) -> list[Any] | None:
        place = f"{self.name}[{self.row}].{self.column}" + ("" if self.item is None else f"[{self.item}]")
        return [place, *self.version] if self.version else None

    def __str__(self) -> str:
        place = f"{self.name} row {self.row}, {self.column}"
        return place if self.item is None else f"{place} {self.item}"


def read_hub(settings: HubSource) -> Listing:
    """All samples of a data set in its order, and what is wrong with the others."""
    data = _open(settings)
    require_columns(shown(settings.path), data.column_names, settings.columns, ("target", "prompt"))
    _require_text(data, settings)
    listing = Listing(shown(settings.path))
    reader = _RowReader(settings, data.with_format("arrow"), _version(data))
    for start in range(0, len(data), _BATCH):
        listing.samples += reader.read(start, min(start + _BATCH, len(data)), listing)
    listing.samples = told_apart(listing.samples)
    note_controls(listing)
    return listing


def _require_text(data: Any, settings: HubSource) -> None:
    for column in _text_columns(settings, data.column_names):
        kind = data.features[column]
        kind = getattr(kind, "feature", kind)  # of a list
        if getattr(kind, "dtype", None) not in ("string", "large_string", "string_view"):
            raise DataError(
                f"{settings.path}: the column {column!r} holds {kind}, not text",
                "set columns.prompt of the source to a column with texts.",
            )


def _text_columns(settings: HubSource, present: Sequence[str]) -> list[str]:
    columns = settings.columns
    wanted = [columns.prompt, *(columns.captions or ()), *([columns.prompt_2] if columns.prompt_2 else [])]
    return [column for column in wanted if column in present]


def _open(settings: HubSource) -> Any:
    try:
        import datasets  # noqa: PLC0415  (an extra)
    except ImportError:
        raise DataError(
            f"{settings.path} is a Hugging Face data set, and the package datasets is not installed",
            "pip install 'qflux[datasets]'.",
        ) from None
    path = settings.path
    try:
        if path.suffix == ".parquet":
            return datasets.load_dataset("parquet", data_files={settings.split: str(path)}, split=settings.split)
        if path.suffix == ".arrow":
            return datasets.Dataset.from_file(str(path))
        if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
            saved = datasets.load_from_disk(str(path))
            return saved[settings.split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(str(path), split=settings.split, revision=settings.revision)
    except Exception as error:
        raise DataError(
            f"the data set {path} (split {settings.split}) can't be read: {error}",
            "check its name and split, the network, and HF_TOKEN if it is private.",
        ) from error


def _version(data: Any) -> tuple[Any, ...] | None:
    """Changes with the files behind a data set; none if it lives in memory."""
    files = [Path(file["filename"]) for file in data.cache_files]
    if not files:
        return None
    return (key_of([[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]),)


class _RowReader:
    def __init__(self, settings: HubSource, table: Any, version: tuple[Any, ...] | None) -> None:
        self._settings = settings
        self._table = table
        self._version = version
        columns = settings.columns
        wanted = (columns.target, *columns.controls, columns.mask)
        self._present = [name for name in wanted if name in table.column_names]
        self._texts = table.select_columns(_text_columns(settings, table.column_names))

    def read(self, start: int, stop: int, listing: Listing) -> list[ListedSample]:
        columns = self._settings.columns
        texts = self._texts[start:stop].to_pylist()
        shapes = {name: self._cells(name, start, stop) for name in self._present}
        samples = []
        for offset, text in enumerate(texts):
            row = start + offset
            name = f"{self._settings.path.name}[{self._settings.split}][{row}]"
            target = shapes[columns.target][offset]
            controls = _in_order([shapes[column][offset] for column in columns.controls if column in shapes])
            mask = shapes[columns.mask][offset] if columns.mask in shapes else ()
            if len(target) != 1 or len(mask) > 1:
                problem = f"{len(target)} target images, {len(mask)} masks; one target and at most one mask are right"
                listing.fault(name, problem)
            elif any(cell is None for cell in controls):
                listing.fault(name, f"{', '.join(columns.controls)} has a gap: an image is missing")
            elif wording := read_wording(text, columns, name, listing):
                images = tuple(cell for cell in controls if cell is not None)
                called = _file_name(target[0]) or name
                found = ListedSample(called, target[0], wording.prompt, images, mask[0] if mask else None, place=name)
                samples.append(wording.put_into(found))
        return samples

    def _cells(self, column: str, start: int, stop: int) -> list[tuple[Any, ...]]:
        """The images of a column in each row; what is null is left out of a plain column, and None in a list."""
        # Scalars of a chunked column point into it; joining the chunks would copy every image.
        values = self._table.select_columns([column])[start:stop].column(column)
        if _is_list(values.type):
            return [
                tuple(
                    self._cell(column, row, item, value) if value.is_valid else None
                    for item, value in enumerate(listed.values if listed.is_valid else ())
                )
                for row, listed in enumerate(values, start=start)
            ]
        return [
            (self._cell(column, row, None, value),) if value.is_valid else ()
            for row, value in enumerate(values, start=start)
        ]

    def _cell(self, column: str, row: int, item: int | None, value: Any) -> ImageRef:
        """An image kept as bytes, or a path: relative to a local data set's folder."""
        path = _path_of(value)
        if path is None:
            file = value["path"].as_py() if isinstance(value, Mapping) and "path" in value else None
            return ImageCell(shown(self._settings.path), row, column, item, self._table, self._version, file)
        root = self._settings.path if self._settings.path.is_dir() else self._settings.path.parent
        return ImageFile(root / path)


def _file_name(image: ImageRef) -> str | None:
    """What people call an image of a data set, if it has a name of its own."""
    name = image.file if isinstance(image, ImageCell) else image.path.name if isinstance(image, ImageFile) else None
    return shown(name) if name else None


def _in_order(columns: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The cells of several columns; an empty column before one that is not is a gap."""
    filled = max((place for place, cells in enumerate(columns, start=1) if cells), default=0)
    return tuple(cell for cells in columns[:filled] for cell in cells or (None,))


def _is_list(kind: Any) -> bool:
    import pyarrow  # noqa: PLC0415  (comes with datasets)

    types = pyarrow.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _path_of(value: Any) -> str | None:
    """The path of an image that is not in the table itself. Looks at Arrow scalars: no bytes are copied."""
    import pyarrow  # noqa: PLC0415

    if pyarrow.types.is_struct(value.type):
        has_bytes = "bytes" in value and value["bytes"].is_valid
        return value["path"].as_py() if not has_bytes and "path" in value else None
    types = pyarrow.types
    if types.is_string(value.type) or types.is_large_string(value.type) or types.is_string_view(value.type):
        return str(value.as_py())
    if not (types.is_binary(value.type) or types.is_large_binary(value.type) or types.is_binary_view(value.type)):
        raise DataError(f"a column of {value.type} holds no images", "map the columns of the source to images.")
    return None
