"""What people call the parts of a pair: words in the names of folders, files and columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["text", "mask", "wanted", "reference", "given"]

WORDS: dict[Role, tuple[str, ...]] = {
    "text": ("instruction", "prompt", "caption", "text", "txt"),
    "mask": ("mask",),
    "wanted": (
        "target", "after", "output", "edited", "result", "dst", "out", "wanted", "edit", "training", "gt",
    ),
    "reference": ("reference", "ref", "style", "subject"),
    "given": ("control", "before", "input", "source", "original", "src", "condition", "conditioning", "in", "orig"),
}  # fmt: skip
"""Looked for in this order: `input_masks` are masks, `target_prompts` are texts."""
CHINESE: dict[Role, tuple[str, ...]] = {
    "text": ("提示词", "提示", "描述", "指令"),
    "mask": ("蒙版", "遮罩"),
    "wanted": ("后", "目标", "输出", "结果"),
    "reference": ("参考", "参考图"),
    "given": ("前", "原图", "输入"),
}
"""Ends of names: there are no spaces between the words of Chinese."""
LETTERS: dict[str, Role] = {"a": "given", "b": "wanted"}
"""Only where both occur: `x_a.png` and `x_b.png`, `trainA/` and `trainB/`."""


@dataclass(frozen=True)
class Part:
    """What a name says about its picture: `control_2` is the given one, number 2."""

    role: Role
    number: int = 0


def words(name: str) -> list[str]:
    """The words of a name, in the singular: `beforeImages`, `before_image` and `Before image` are the same."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    return [word if len(word) < 4 else word.removesuffix("s") for word in re.split(r"[^a-z]+", apart) if word]


def part_of(name: str, letters: bool = False) -> Part | None:
    """The part that the name of a folder or a column speaks of, if any."""
    found = words(name)
    number = re.search(r"(\d+)\D*$", name)
    count = int(number[1][:6]) if number else 0
    for role, known in WORDS.items():
        if any(word in known for word in found):
            return Part(role, count)
    bare = re.sub(r"[-_ ]?\d*$", "", name)
    for role, ends in CHINESE.items():
        if bare.endswith(ends):
            return Part(role, count)
    if letters and found and found[-1] in LETTERS:
        return Part(LETTERS[found[-1]])
    return None


_FILLING = frozenset({"image", "img", "photo", "picture", "folder", "set", "data", "train", "file", "path"})


def is_plain(name: str) -> bool:
    """The name of a folder says its part and nothing else: `edited_images`, `control_2`."""
    known = {word for part in WORDS.values() for word in part} | LETTERS.keys()
    return all(word in known | _FILLING for word in words(name))


def split_name(stem: str, letters: bool = False) -> tuple[str, Part] | None:
    """`cat_before` is the given picture of `cat`; `before` alone has no name of its own. Nothing: it says no part."""
    match = re.fullmatch(r"(?:(?P<own>.*?)[-_. ])?(?P<word>[^\W\d_]+)[-_. ]?(?P<number>\d{0,6})", stem, re.DOTALL)
    if match is None:
        return None
    word, number = match["word"].lower(), int(match["number"] or 0)
    word = word if len(word) < 4 else word.removesuffix("s")
    own = match["own"] or ""
    for role, known in WORDS.items():
        if word in known:
            return own, Part(role, number)
    for role, ends in CHINESE.items():
        if word.endswith(ends):
            return own, Part(role, number)
    if letters and own and word in LETTERS and not match["number"]:
        return own, Part(LETTERS[word])
    return None
