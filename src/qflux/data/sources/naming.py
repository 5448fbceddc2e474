"""How the files and columns of one sample are named after it: `cat`, `cat_control_1`, `cat_mask`, `cat_caption_1`."""

from __future__ import annotations

import re
from collections.abc import Container

CONTROL, MASK, CAPTION, PROMPT_2 = "_control", "_mask", "_caption", "_prompt_2"


def numbered(name: str, base: str) -> int | None:
    """The number k of `<base>_k`, counted from 1, if a name is one."""
    found = re.fullmatch(re.escape(base) + r"_([1-9]\d{0,8})", name)
    return int(found[1]) if found else None


def further_control(stem: str) -> tuple[str, int] | None:
    """The sample and the number of a further control, `<base>_control_k`, if a name is one."""
    return _numbered_of(stem, CONTROL)


def further_caption(stem: str) -> tuple[str, int] | None:
    """The sample and the number of another wording of its prompt, `<base>_caption_k`, if a name is one."""
    return _numbered_of(stem, CAPTION)


def _numbered_of(stem: str, kind: str) -> tuple[str, int] | None:
    found = re.fullmatch(rf"(.+){kind}_([1-9]\d{{0,8}})", stem, re.DOTALL)
    return (found[1], int(found[2])) if found else None


def masked_base(stem: str, bases: Container[str]) -> str | None:
    """The sample that an image is the mask of, `<base>_mask`, if it is one of `bases`."""
    base = stem.removesuffix(MASK)
    return base if base != stem and base in bases else None


def owner(stem: str) -> str:
    """The name of the sample that a control, a mask or a target of this name would belong to."""
    return re.sub(rf"{CONTROL}_\d+$|{MASK}$", "", stem)
