"""Text in pictures, in any script: file names and prompts are in whatever language people speak.

Pillow's font has Latin letters only. The fonts beside this file have Chinese, Japanese, Korean, Cyrillic, Greek, Arabic
and Hebrew ones, and more; what they lack is looked for among the fonts of the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import ImageFont

_SHIPPED = tuple(Path(__file__).with_name("fonts") / name for name in ("wqy-microhei.ttf", "dejavu-sans.ttf"))
_NOWHERE = "\U0010ffff"
"""No font has it: what is drawn for it is what is drawn for a missing letter."""
_MOST_FONTS = 400


@cache
def font(size: int) -> Any:
    """The font of all pictures."""
    return ImageFont.load_default(size)


def draw_text(pen: Any, place: tuple[float, float], text: str, fill: Any, size: int, anchor: str = "la") -> None:
    """Draw a line of text as `ImageDraw.text` does, each letter in a font that has it."""
    runs = list(_runs(text, size))
    if len(runs) <= 1 and (not runs or runs[0][1] is font(size)):
        pen.text(place, text, fill, font(size), anchor=anchor)
        return
    left, top = place
    left -= {"l": 0.0, "m": 0.5, "r": 1.0}[anchor[0]] * text_width(text, size)
    ascent, descent = font(size).getmetrics()
    baseline = top + {"a": ascent, "m": (ascent - descent) / 2, "s": 0}[anchor[1]]
    for part, letters in runs:
        pen.text((left, baseline), part, fill, letters, anchor="ls")
        left += letters.getlength(part)


def text_width(text: str, size: int) -> float:
    """How wide a line of text is."""
    return sum(letters.getlength(part) for part, letters in _runs(text, size))


def fitting(text: str, size: int, width: float) -> str:
    """A text, or its beginning and an ellipsis, that is not wider than this."""
    if text_width(text, size) <= width:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text_width(text[:middle] + "…", size) <= width else (low, middle - 1)
    return text[:low] + "…"


def _runs(text: str, size: int) -> Iterator[tuple[str, Any]]:
    """Parts of a text with the font of each; a space goes with what is before it."""
    sources: list[Path | None] = []
    for letter in text:
        sources.append(sources[-1] if letter == " " and sources else _source_of(letter))
    for source, letters in groupby(zip(sources, text, strict=True), key=lambda pair: pair[0]):
        part = "".join(letter for _, letter in letters)
        yield part, font(size) if source is None else _opened(source, size)


@cache
def _source_of(letter: str) -> Path | None:
    """The file of a font that has a letter; nothing is Pillow's own, which also stands for letters nobody has."""
    if letter.isspace() or letter.isascii() or _has(font(16), letter):
        return None
    for path in (*_SHIPPED, *_of_the_machine()):
        try:
            if _has(_opened(path, 16), letter):
                return path
        except OSError:  # a file that is no font after all
            continue
    return None


def _has(letters: Any, letter: str) -> bool:
    """Whether a font draws something else for a letter than for one that no font has."""
    drawn, missing = (letters.getmask(text) for text in (letter, _NOWHERE))
    return (drawn.size, bytes(drawn)) != (missing.size, bytes(missing)) and bytes(drawn).strip(b"\0") != b""


@cache
def _opened(path: Path, size: int) -> Any:
    return ImageFont.truetype(path, size)


@cache
def _of_the_machine() -> tuple[Path, ...]:
    home = Path.home()
    places = {
        "darwin": ("/System/Library/Fonts", "/Library/Fonts", home / "Library/Fonts"),
        "win32": ("C:/Windows/Fonts", home / "AppData/Local/Microsoft/Windows/Fonts"),
    }.get(sys.platform, ("/usr/share/fonts", "/usr/local/share/fonts", home / ".local/share/fonts", home / ".fonts"))
    found = (file for place in places for file in sorted(Path(place).rglob("*.[tTo][tT][fFcC]")))
    return tuple(file for file, _ in zip(found, range(_MOST_FONTS), strict=False))
