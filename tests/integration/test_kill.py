"""kill -9 during `qflux fit` loses nothing: the resumed run ends in the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from qflux.training.trainer import Trainer


def start_fit(config_file: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "qflux.main", "--config", str(config_file), "--mode", "fit"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_for(path: Path, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.002)


def test_kill_9_during_fit_then_resume_ends_in_the_same_bytes(config, tmp_path):
    steps = "train.max_train_steps=14"
    every = "train.checkpoint_every=2"
    whole = Trainer(config("run_name=whole", steps, every)).fit()

    settings = config("run_name=killed", steps, every)
    config_file = tmp_path / "killed.yaml"
    config_file.write_text(yaml.safe_dump(settings.dump()))
    checkpoints = settings.run_dir / "checkpoints"
    for number in (4, 10):
        process = start_fit(config_file)
        wait_for(checkpoints / f"step-{number:08d}", process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (settings.run_dir / "adapter").exists(), "killed too late to prove anything"

    torn = checkpoints / "step-00000099"
    torn.mkdir()
    (torn / "parameters.safetensors").write_bytes(b"torn")
    resumed = Trainer(settings).fit()
    assert resumed.resumed_from >= 10
    assert resumed.adapter.read_bytes() == whole.adapter.read_bytes()
