"""How far somebody has to read who follows a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "trace_fit.py"


def test_no_stage_of_a_run_enters_more_than_fifty_files():
    spec = importlib.util.spec_from_file_location("trace_fit", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    entered = script.traced().entered
    assert set(script.STAGES.values()) <= set(entered), "a stage is never entered"
    files = {stage: {file for file, _ in found} for stage, found in entered.items()}
    assert max(map(len, files.values())) <= 50, {stage: len(found) for stage, found in files.items()}
