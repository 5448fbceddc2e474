"""What tests share: running a command, reading what a run wrote, pictures, the bytes of a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from qflux.cli import main
from qflux.commands import Trainer
from qflux.config import Config


def run(*arguments: object, entry: Callable[[Sequence[str]], None] = main) -> int:
    """A command in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        entry(list(map(str, arguments)))
    return int(ended.value.code or 0)


def fit(config: Config, rank: int = 0) -> None:
    """What each process of a `World` does."""
    Trainer(config).fit()


def lines(config: Config, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a file of a run; nothing where it is not there yet."""
    file = config.run_dir / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write_config(config: Config, file: Path) -> str:
    """A config as a file, for commands."""
    file.write_text(yaml.safe_dump(config.dump()))
    return str(file)


def tree(folder: Path) -> dict[str, bytes]:
    """The contents of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise: no two are alike."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def tensors(encoded: Any) -> list[Any]:
    """Everything of an encoded sample that can be compared."""
    return [encoded.text.tokens, encoded.target, *encoded.controls]
