"""Ways to spoil bytes and values."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any


def spoiled(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Other bytes than `data`, and how they came about."""
    while True:
        kind = draw.choice(sorted(WAYS))
        found = WAYS[kind](data, draw)
        if found != data:
            return found, kind


def _flips(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 10, 30)) if data else 0):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _swap(data: bytes, draw: random.Random) -> bytes:
    """Two pieces change places."""
    half = len(data) // 2
    length = min(draw.choice((1, 4, 8, 64, 4096)), half)
    first, second = draw.randrange(half - length + 1), draw.randrange(half, len(data) - length + 1)
    one, other = data[first : first + length], data[second : second + length]
    return data[:first] + other + data[first + length : second] + one + data[second + length :]


def _zeros(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    length = draw.randint(0, len(data) - place)
    return data[:place] + bytes(length) + data[place + length :]


def _other(data: bytes, draw: random.Random) -> bytes:
    """Something else altogether: an archive, a pickle, a picture, noise."""
    return draw.choice((
        b"PK\x03\x04" + draw.randbytes(200), b"\x80\x04\x95" + draw.randbytes(50), b"{}", b"null", b"[]",
        b"\x89PNG\r\n\x1a\n" + draw.randbytes(100), draw.randbytes(1000),
    ))  # fmt: skip


WAYS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flips": _flips,
    "cut": lambda data, draw: data[: draw.randrange(len(data) + 1)],
    "cut in front": lambda data, draw: data[draw.randrange(len(data) + 1) :],
    "swap": _swap,
    "double": lambda data, draw: data + data,
    "empty": lambda data, draw: b"",
    "zeros": _zeros,
    "other": _other,
    "more": lambda data, draw: data + draw.randbytes(draw.randint(1, 100)),
}


ODD = (
    None, True, False, 0, -1, 1, 2, 7, 16, 10**9, -(10**9), 10**30, 0.0, -0.5, 0.3, 1e-320, 1e308, float("nan"),
    float("inf"), "", " ", "auto", "none", "null", "true", "0", "-1", "1e3", "../..", "/", "/dev/null", "~nobody",
    "a\0b", "\U0001f600", "x" * 5000, "${HOME}", "{{x}}", "bfloat16", "512*512", "16GB", [], {}, [None], [1, 2],
    [512, 512], {"a": 1}, {"path": None}, ["512*512", "0*0"], {"kind": "x"}, "os.system", "torch.optim.AdamW",
)  # fmt: skip


def odd_value(draw: random.Random) -> Any:
    """A value that somebody might have in a config or a table by mistake, or on purpose."""
    if draw.random() < 0.03:
        nested: Any = 1
        for _ in range(draw.randint(5, 60)):
            nested = [nested]
        return nested
    return copy.deepcopy(draw.choice(ODD))
