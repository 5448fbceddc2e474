"""What all sections of a configuration are made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from qflux.models.registry import all_facts

STEP = min(facts.size_multiple for facts in all_facts())
"""Sizes are multiples of this many pixels; a family may ask for more."""


class Marks:
    """What a setting means beside its value: it stands on the field itself, so that a new one can't be forgotten.

    It is handed to pydantic as the field's `json_schema_extra`, and leaves the JSON Schema as it is.
    """

    def __init__(self, resume: bool, record: bool, if_set: bool = False, unless: tuple[Any, ...] = ()) -> None:
        self.resume = resume
        """A run may only go on with the value that it began with."""
        self.record = record
        """A LoRA file says what it was."""
        self.if_set = if_set
        """Both only where it is not the default: checkpoints and files of before it existed have none."""
        self.unless = unless
        """Values of which the same holds."""

    def __call__(self, schema: dict[str, Any]) -> None:
        pass


DECIDES = Marks(resume=True, record=True)
"""What is learnt depends on it."""
MATCHES = Marks(resume=True, record=False)
"""What is learnt depends on it, but it says where something is on somebody's disk."""
NOTED = Marks(resume=False, record=True)
"""Worth knowing of a LoRA, and may change while it trains."""
FREE = Marks(resume=False, record=False)
"""How something is computed, or where: the result does not depend on it."""
DECIDES_IF_SET = Marks(resume=True, record=True, if_set=True)


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


def _memory(value: Any) -> Any:
    """Bytes, from an integer or a string such as "16GB" or "11.5 GiB"."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GM])(i?)B\s*", value, re.IGNORECASE)
        if not match:
            raise ValueError('memory is a number of bytes or a string such as "16GB" or "11.5GiB"')
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** (3 if match[2].upper() == "G" else 2))
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
Memory = Annotated[
    int,
    BeforeValidator(_memory),
    Field(ge=2**28),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}], "examples": ["16GB", "11.5GiB"]}),
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v),
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1}),
]
