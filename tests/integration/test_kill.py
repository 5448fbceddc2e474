"""kill -9 during `qflux fit` loses nothing: the resumed run ends in the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from conftest import make_config
from family_samples import REFERENCES
from helpers import fit, lines
from qflux.commands import Trainer
from qflux.config import Config
from qflux.models.loading import save_checkpoint
from worlds import HANG, World

EVERY = 10


def steps_done(config: Config) -> int:
    file = config.run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def result(config: Config, steps: int) -> dict[str, bytes]:
    """What a run ends with: the adapter, the best one, and the last checkpoint with average and optimizer."""
    last = config.run_dir / "checkpoints" / f"step-{steps:08d}"
    files = [*last.iterdir(), *(config.run_dir / "adapter").iterdir(), *(config.run_dir / "best").iterdir()]
    return {
        str(f.relative_to(config.run_dir)): f.read_bytes() for f in files if f.suffix != ".md"
    }  # it has the run's name


SETTINGS = [
    "data.batch_size=1",
    "data.held_out={count: 2}",
    f"train.checkpoint_every={EVERY}",
    "train.ema={decay: 0.99}",
    "train.lr_scheduler=cosine",
    "lora.dropout=0.1",
    "validation.images=0",
    "validation.noise_levels=2",
]


@pytest.mark.parametrize(
    ("size", "kills", "steps"),
    [
        (1, 3, 30),
        pytest.param(1, 20, 200, marks=pytest.mark.slow),
        pytest.param(2, 10, 100, marks=pytest.mark.slow),
    ],
)
def test_kill_9_at_any_moment_of_a_run_ends_in_the_same_bytes(config, tmp_path, size, kills, steps):
    require_same_after_kills(config, tmp_path, size, kills, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-image-edit-plus, 2511", "flux2", "qwen-image-2.1"])
def test_kill_9_loses_nothing_of_another_kind_of_model(name, tmp_path, data_set):
    reference = REFERENCES[name]
    save_checkpoint(reference.components(0), tmp_path / "model", reference.pipeline_name)

    def config(*overrides: str) -> Config:
        own = [f"family={reference.family}", "model.max_sequence_length=null"]
        return make_config(tmp_path / "model", data_set, tmp_path / "cache", tmp_path / "runs", *own, *overrides)

    Trainer(config(*SETTINGS)).cache()
    require_same_after_kills(config, tmp_path, size=1, kills=4, steps=30)


def require_same_after_kills(config, folder, size, kills, steps):
    """A run that is killed so often ends as one that is not."""
    shared = [*SETTINGS, f"train.max_train_steps={steps}"]
    whole, killed = config(*shared, "run_name=whole"), config(*shared, "run_name=killed")
    World(fit, whole, size, folder / "whole").finish()

    moments = random.Random(size)
    goals = sorted(moments.sample(range(1, steps - 1), kills - 2))
    for number, goal in enumerate([0, *goals, steps - 1]):
        world = World(fit, killed, size, folder / f"notes-{number}")
        if number % 5 == 0:
            time.sleep(moments.uniform(0.0, 0.3))  # while it loads, resumes, or checks that all will work
        deadline = time.monotonic() + HANG
        while steps_done(killed) < goal:
            assert world.is_alive, "it ended too early to prove anything"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.05))
        world.kill()
        assert not (killed.run_dir / "adapter").exists(), "killed too late to prove anything"
    World(fit, killed, size, folder / "last").finish()

    assert result(killed, steps) == result(whole, steps)
    assert [line["step"] for line in lines(killed)] == list(range(1, steps + 1))
    for name, keys in (("metrics.jsonl", ("step", "loss", "grad_norm", "learning_rate")), ("validation.jsonl", None)):
        first, second = (
            [{key: line[key] for key in keys or line} for line in lines(settings, name)] for settings in (killed, whole)
        )
        assert first == second


@pytest.mark.slow
def test_the_command_line_goes_on_after_kill_9_and_names_a_torn_checkpoint(config, tmp_path):
    settings = config("train.max_train_steps=12", "train.checkpoint_every=2")
    config_file = tmp_path / "killed.yaml"
    config_file.write_text(yaml.safe_dump(settings.dump()))
    command = [sys.executable, "-m", "qflux.main", "--config", str(config_file), "--mode", "fit"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    checkpoints, deadline = settings.run_dir / "checkpoints", time.monotonic() + HANG
    while not (checkpoints / "step-00000004").exists():
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    torn = checkpoints / "step-00000099"
    torn.mkdir()
    (torn / "parameters.safetensors").write_bytes(b"torn")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "step-00000099" in ended.stderr.replace("\n", "")
    assert "continued from step" in ended.stdout
