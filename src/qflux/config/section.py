"""What all sections of a configuration are made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

STEP = 16
"""Sizes are multiples of this many pixels: one token."""


class Section(BaseModel):
    """A part of the configuration: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _area(value: Any) -> Any:
    """An area in pixels, from an integer or a string such as "512*768"."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+)\s*[*x×]\s*(\d+)\s*", value)
        if not match:
            raise ValueError('an area is an integer of pixels or a string such as "512*768"')
        return int(match[1]) * int(match[2])
    return value


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{error} Write the path in full") from None


def _side(value: int) -> int:
    if value % STEP:
        lower = value // STEP * STEP
        raise ValueError(f"must be a multiple of {STEP}; nearest are {lower} and {lower + STEP}")
    return value


AREA_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": STEP * STEP},
        {"type": "string", "pattern": r"^\s*\d+\s*[*x×]\s*\d+\s*$", "examples": ["512*768"]},
    ]
}
_SIDE_SCHEMA = {"type": "integer", "minimum": STEP, "multipleOf": STEP}
_SIZE_SCHEMA = {"type": "array", "prefixItems": [_SIDE_SCHEMA, _SIDE_SCHEMA], "minItems": 2, "maxItems": 2}

Area = Annotated[int, BeforeValidator(_area), Field(ge=STEP * STEP), WithJsonSchema(AREA_SCHEMA)]
Side = Annotated[int, Field(ge=STEP), BeforeValidator(lambda v: _side(v) if isinstance(v, int) else v)]
Size = Annotated[
    tuple[Side, Side],
    BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v),
    WithJsonSchema(_SIZE_SCHEMA),
]
Folder = Annotated[Path, Field(strict=False), AfterValidator(_expanded), WithJsonSchema({"type": "string"})]
Paths = Annotated[
    tuple[Folder, ...],
    Field(strict=False),
    BeforeValidator(lambda v: (v,) if isinstance(v, str | Path) else v),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda v: (v,) if isinstance(v, str) else tuple(v) if isinstance(v, list) else v),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v),
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1}),
]
