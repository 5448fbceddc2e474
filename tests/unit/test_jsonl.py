"""Files of JSON lines: a file that grows is read on from where it was left, whatever happens to it."""

from __future__ import annotations

import json
import random

import pytest

from qflux.files.atomic import write_bytes
from qflux.files.jsonl import GrowingLines, read_lines

TORN = [b'{"step": ', b"\n", b"[1]\n", b"\xff\xfe\n", b'{"step": 7}']


@pytest.mark.parametrize("seed", range(30))
def test_what_was_read_on_is_what_is_in_the_file(tmp_path, seed):
    draw, path = random.Random(seed), tmp_path / "metrics.jsonl"
    growing, step = GrowingLines(path), 0
    for _ in range(40):
        kind = draw.random()
        if kind < 0.1:
            path.unlink(missing_ok=True)
        elif kind < 0.25:  # a resumed run keeps some lines, and goes on in a new file
            kept = [line for line in read_lines(path) if draw.random() < 0.7]
            write_bytes(path, b"".join(json.dumps(line).encode() + b"\n" for line in kept))
        else:
            with path.open("ab") as file:
                for _ in range(draw.randint(0, 4)):
                    step += 1
                    file.write(draw.choice(TORN) if draw.random() < 0.2 else b'{"step": %d}\n' % step)
        if draw.random() < 0.7:
            assert growing.read() == list(read_lines(path))


def test_what_was_read_is_not_read_again(tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    growing, loads = GrowingLines(path), json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    with path.open("a") as file:
        for step in range(1000):
            file.write(json.dumps({"step": step}) + "\n")
            file.flush()
            if step % 10 == 9:
                assert len(growing.read()) == step + 1
    assert len([text for text in parsed if text]) == 1000
