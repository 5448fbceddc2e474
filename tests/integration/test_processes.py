"""Several processes stop, fail and are refused together."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
import yaml

from helpers import fit, lines
from qflux.commands import Trainer
from qflux.config import Config
from qflux.errors import Interrupted, QfluxError
from worlds import HANG, World


def interrupted(config: Config, rank: int, number: int) -> None:
    """Rank 1 gets SIGTERM after its second step, nobody else does."""

    def stop(self, loss):
        self.count = getattr(self, "count", 0) + 1
        if rank == 1 and self.count == 2:
            os.kill(os.getpid(), number)

    from qflux.training.optimizer.step import Update

    original = Update.apply
    Update.apply = lambda self, n, loss: (stop(self, loss), original(self, n, loss))[1]
    with pytest.raises(Interrupted, match="stopped and saved after step 2 of 6"):
        Trainer(config).fit()


def failing(config: Config, rank: int) -> None:
    with pytest.raises(QfluxError, match="belongs to another configuration" if rank == 0 else "."):
        Trainer(config).fit()


def refused(config: Config, rank: int) -> None:
    with pytest.raises(QfluxError, match="another run" if rank == 0 else "the first process has failed"):
        Trainer(config).fit()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_one_process_stops_all_of_them_at_the_same_step(config, tmp_path, number):
    shared = ["data.batch_size=2", "train.max_train_steps=6"]
    settings = config(*shared, "run_name=stopped")
    World(interrupted, settings, 2, tmp_path / "notes", number).finish()
    assert [path.name for path in (settings.run_dir / "checkpoints").iterdir()] == ["step-00000002"]
    World(fit, settings, 2, tmp_path / "rest").finish()
    whole = config(*shared, "run_name=whole")
    World(fit, whole, 2, tmp_path / "whole").finish()
    adapters = [c.run_dir / "adapter" / "pytorch_lora_weights.safetensors" for c in (settings, whole)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_an_error_reaches_every_process(config, tmp_path):
    Trainer(config("train.max_train_steps=1", "data.batch_size=2")).fit()
    changed = config("train.max_train_steps=2", "data.batch_size=2", "lora.rank=8")
    World(failing, changed, 2, tmp_path / "notes").finish()


def test_two_runs_on_one_folder_are_refused_on_every_process(config, tmp_path):
    from qflux.files.locks import exclusive

    settings = config()
    with exclusive(settings.run_dir):
        World(refused, settings, 2, tmp_path / "notes").finish()


@pytest.mark.slow
def test_torchrun_and_accelerate_start_it(config, tmp_path):
    import subprocess
    import sys

    settings = config("data.batch_size=1", "train.max_train_steps=2", "run_name=launched")
    file = tmp_path / "config.yaml"
    results = []
    for launcher in (
        ["torch.distributed.run", "--nproc-per-node", "2"],
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"],
    ):
        shutil.rmtree(settings.run_dir, ignore_errors=True)
        file.write_text(yaml.safe_dump(settings.dump()))
        command = [sys.executable, "-m", *launcher, "-m", "qflux.cli", "fit", "--config", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert ended.stdout.count("LoRA: ") == 1, "only the first process speaks"
        assert lines(settings)[0]["samples"] == 2
        results.append((settings.run_dir / "adapter" / "pytorch_lora_weights.safetensors").read_bytes())
    assert results[0] == results[1]
