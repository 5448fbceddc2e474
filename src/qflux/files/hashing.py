"""Hashes of files and of values: the keys of everything that is addressed by its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_of(*parts: Any) -> str:
    """A hash of JSON values; equal parts give equal keys on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def seed_of(*parts: Any) -> int:
    """A seed for a random generator; equal parts give equal seeds on every machine."""
    return int(key_of(*parts)[:15], 16)
