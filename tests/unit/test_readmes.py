"""README.zh.md is README.md in Chinese: the same sections, commands, figures, pictures and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))


def fenced(text: str, kind: str) -> list[str]:
    """The code blocks of a kind."""
    parts = re.split(r"^```(\w*)\n", text + "\n", flags=re.M)
    return [content for name, content in zip(parts[1::4], parts[2::4], strict=False) if name == kind]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def test_sections_are_the_same_in_number_and_order():
    shapes = [re.findall(r"^(#+) ", text, re.M) for text in (ENGLISH, CHINESE)]
    assert shapes[0] == shapes[1]
    parts = [re.split(r"^## ", text, flags=re.M)[1:] for text in (ENGLISH, CHINESE)]
    for one, other in zip(*parts, strict=True):
        assert one.count("\n```") == other.count("\n```"), one[:40]
        assert one.count("\n|") == other.count("\n|"), "rows of tables"


def test_commands_and_programs_are_the_same():
    for kind in ("bash", "python"):
        assert fenced(ENGLISH, kind) == fenced(CHINESE, kind)
    code = [
        Counter(
            re.findall(
                r"`([^`\n]+)`", prose(text).replace("`train.deterministic:\ntrue`", "`train.deterministic: true`")
            )
        )
        for text in (ENGLISH, CHINESE)
    ]
    assert code[0].keys() == code[1].keys()


def test_figures_are_the_same():
    def figures(text: str) -> Counter[str]:
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)|\[[^\]]*\]", "", prose(text))
        return Counter(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?![\w.]*[A-Za-z])", plain))

    assert figures(ENGLISH) == figures(CHINESE)


def test_pictures_links_and_the_tree_are_the_same():
    links = [sorted(set(re.findall(r"\]\(([^)]+)\)", text))) for text in (ENGLISH, CHINESE)]
    assert [link for link in links[0] if link != "README.zh.md"] == [link for link in links[1] if link != "README.md"]
    trees = []
    for text in (ENGLISH, CHINESE):
        (tree,) = [block for block in fenced(text, "") if block.startswith("recipes/")]
        trees.append(
            [re.match(r" *([\w./-]+(?: +[\w.]+\.py\b)?)", line)[1] for line in tree.splitlines() if line.strip()]
        )
    assert trees[0] == trees[1]


def test_every_file_that_the_tree_names_is_there():
    (tree,) = [block for block in fenced(ENGLISH, "") if block.startswith("recipes/")]
    folders = (ROOT / "src", ROOT / "scripts")
    known = {path.name for folder in folders for path in folder.rglob("*")} | {path.name for path in ROOT.iterdir()}
    named = set(re.findall(r"[\w.-]+\.py\b", tree)) | {
        name.rstrip("/") for name in re.findall(r"^ *([\w-]+/)", tree, re.M)
    }
    assert named - known - {"src"} == set()
