"""A short, fixed part of `make torture`: the same cases every time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torture import faults
from torture.attacks import ATTACKS

TESTS = Path(__file__).parents[1]


def torture(*arguments: object, keep: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torture", *map(str, arguments), "--keep", str(keep)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "parity")])},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_nothing_goes_wrong_in_the_short_part(tmp_path):
    ended = torture("--quick", "--seed", 1, "--workers", 1, keep=tmp_path)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-3000:]
    for name, attack in ATTACKS.items():
        assert re.search(rf"^\| {name} \| {attack.quick} \| \d+ \| 0 \|$", ended.stdout, re.MULTILINE), ended.stdout


@pytest.mark.slow
def test_a_fault_is_found_and_can_be_repeated(tmp_path, capsys):
    fault = faults.FAULTS["unknown keys"]
    assert faults.is_found(fault, 1.0, 1, "configs.recipe").startswith("configs.recipe:")


def test_faults_are_of_the_code_as_it_is():
    for name, fault in faults.FAULTS.items():
        text = (faults.SOURCE / "qflux" / fault.file).read_text()
        assert text.count(fault.there) == 1, f"{name}: {fault.file} does not have this once: {fault.there}"
