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
        "target", "after", "output", "edited", "result", "dst", "out", "wanted", "edit", "gt", "truth", "final",
        "retouched", "clean", "sharp",
    ),
    "reference": ("reference", "ref", "style", "subject"),
    "given": (
        "control", "before", "input", "source", "original", "src", "condition", "conditioning", "in", "orig", "raw",
        "unedited", "noisy", "blurry", "degraded",
    ),
}  # fmt: skip
"""Looked for in this order: `input_masks` are masks, `target_prompts` are texts."""
CHINESE: dict[Role, tuple[str, ...]] = {
    "text": ("提示词", "提示", "描述", "指令"),
    "mask": ("蒙版", "遮罩"),
    "wanted": ("后", "目标", "输出", "结果"),
    "reference": ("参考图", "参考"),
    "given": ("前", "原图", "输入"),
}
"""Ends of names: there are no spaces between the words of Chinese."""
LETTERS: dict[str, Role] = {"a": "given", "b": "wanted"}
"""Only where both occur: `x_a.png` and `x_b.png`, `trainA/` and `trainB/`."""
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing", "eval"})
"""Folders of these names hold parts of a data set, not parts of a pair."""

_FILLING = frozenset({"image", "img", "photo", "picture", "folder", "set", "data", "file", "path", "ground"})


@dataclass(frozen=True)
class Part:
    """What a name says about its picture, and what is left of the name: `cats_before_2` is the given one of `cats`."""

    role: Role
    number: int | None = None
    rest: str = ""

    @property
    def is_plain(self) -> bool:
        """The name says the part and nothing else."""
        return not self.rest


def words(name: str) -> list[str]:
    """The words of a name, in the singular: `beforeImages`, `before_image` and `Before image` are the same."""
    return [word for token in _tokens(name) if (word := _singular(re.sub(r"\d", "", token.lower())))]


def _tokens(name: str) -> list[str]:
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return [token for token in re.split(r"[-_. ]+", apart) if token]


def _singular(word: str) -> str:
    return word if len(word) < 4 else word.removesuffix("s")


def part_of(name: str, letters: bool = False) -> Part | None:
    """The part that the name of a folder or a column speaks of, if any."""
    tokens = _tokens(name)
    plain = [_singular(re.sub(r"\d+$", "", token.lower())) for token in tokens]
    for role, known in WORDS.items():
        place = next((n for n, word in enumerate(plain) if word in known), None)
        if place is not None:
            is_negated = role == "wanted" and "not" in plain[:place]
            return _part("given" if is_negated else role, tokens, place)
    bare = re.sub(r"[-_ ]?(\d*)$", "", name)
    for role, ends in CHINESE.items():
        found = next((end for end in ends if bare.endswith(end)), None)
        if found:
            digits = name[len(bare) :].strip("-_ ")
            return Part(role, int(digits[:9]) if digits else None, bare.removesuffix(found).strip("-_ "))
    if letters and tokens and tokens[-1].lower() in LETTERS:
        return Part(LETTERS[tokens[-1].lower()], None, "-".join(tokens[:-1]))
    return None


def _part(role: Role, tokens: list[str], place: int) -> Part:
    """The number behind the word, and the words that say something else."""
    own = re.search(r"\d+$", tokens[place])
    behind = tokens[place + 1 :]
    digits = own[0] if own else behind.pop() if behind and behind[-1].isdigit() else ""
    kept = [token for token in (*tokens[:place], *behind) if _singular(token.lower()) not in _FILLING | {"not"}]
    return Part(role, int(digits[:9]) if digits else None, "-".join(kept))


def split_name(stem: str, letters: bool = False) -> Part | None:
    """The part that stands at the end of a file's name: `cat_before` is the given picture of `cat`.

    `before` alone has no name of its own. Nothing: the end says no part.
    """
    pattern = r"(?:(?P<own>.*?)[-_. ])?(?P<word>[^\W\d_]+)[-_. ]?(?P<number>\d{0,9})"
    match = re.fullmatch(pattern, stem, re.DOTALL)
    if match is None:
        return None
    own, word = match["own"] or "", match["word"]
    number = int(match["number"]) if match["number"] else None
    for role, known in WORDS.items():
        if _singular(word.lower()) in known:
            return Part(role, number, own)
    for role, ends in CHINESE.items():
        found = next((end for end in ends if word.endswith(end)), None)
        if found:
            before = f"{own}_{word.removesuffix(found)}" if own else word.removesuffix(found)
            return Part(role, number, before.strip("_"))
    if letters and own and word.lower() in LETTERS and number is None:
        return Part(LETTERS[word.lower()], None, own)
    return None
