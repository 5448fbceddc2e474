"""Stopped at any moment a command ends with 130 and a sentence; hostile files and full disks end with one too."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from helpers import run
from qflux.commands import Trainer
from qflux.data.images.decode import ImageFile, load_rgb
from qflux.errors import CheckpointError, DataError, redacted
from qflux.files.atomic import new_folder, sweep
from qflux.files.jsonl import append_line
from qflux.runs.folder import RunFolder
from qflux.runs.journal import DrawnEdit, Journal
from worlds import HANG


@pytest.fixture
def config_file(config, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config().dump()))
    return str(file)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "moment",
    ["at once", pytest.param("while torch is read", marks=pytest.mark.slow), "while weights load"],
)
def test_a_signal_ends_a_real_process_without_a_traceback(moment, number, config_file, tmp_path):
    """The process says itself when it is where the signal should find it."""
    where = {
        "at once": "import qflux.cli as spot; name = 'main'",
        "while torch is read": "import qflux.cli.terminal as spot; name = 'trainer_of'",
        "while weights load": "import qflux.models.pretrained as spot; name = 'load_transformer'",
    }[moment]
    program = f"""
import os, sys, time
{where}
def wait(*arguments, **options):
    print('here', flush=True)
    time.sleep(60)
if name == 'main':
    import qflux.cli
    import builtins
    original = builtins.__import__
    def slow(module, *rest):
        if module == 'qflux.cli.app':
            wait()
        return original(module, *rest)
    builtins.__import__ = slow
else:
    setattr(spot, name, wait)
    import qflux.cli.commands.fit
    if name == 'trainer_of':
        qflux.cli.commands.fit.trainer_of = wait
from qflux.cli import main
main(['fit', '--config', {config_file!r}])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "here" in iter(lambda: process.stdout.readline().strip(), "")  # it says before where the run is
    process.send_signal(number)
    _, error = process.communicate(timeout=HANG)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "interrupted" in error
    assert "fetch the checkpoint again" not in error


def test_what_a_library_makes_of_an_interruption_is_an_interruption(config_file, monkeypatch, capsys):
    def loading(*arguments, **options):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise CheckpointError("it can't be loaded", "fetch the checkpoint again.") from None

    monkeypatch.setattr("qflux.models.pretrained.load_transformer", loading)
    assert run("fit", "--config", config_file) == 130
    assert "fetch the checkpoint again" not in capsys.readouterr().err


def test_signals_are_as_they_were_after_a_command(config_file):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run("check", config_file, "--set", "seed=x") == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_pipe_is_no_image_and_is_not_waited_for(tmp_path, config_file, capsys):
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    done: list[Exception] = []

    def look() -> None:
        try:
            load_rgb(ImageFile(pipe))
        except DataError as error:
            done.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(HANG)
    assert done, "it waits for somebody to write into the pipe"
    assert "not a regular file" in str(done[0])
    assert run("predict", "--config", config_file, "--image", str(pipe), "--prompt", "x") == 2
    assert "not a regular file" in capsys.readouterr().err


def test_what_a_kill_has_left_beside_a_picture_is_swept_and_nothing_else(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".edit.png.{dead.pid}.tmp"
    others = [tmp_path / f".edit.png.{os.getpid()}.tmp", tmp_path / ".edit.png.tmp", tmp_path / "edit.png"]
    stranger = tmp_path / f".other.png.{dead.pid}.tmp"
    for file in (left, stranger, *others):
        file.touch()
    sweep(tmp_path, "edit.png")
    assert not left.exists()
    assert stranger.exists()
    sweep(tmp_path)
    assert not stranger.exists()
    assert all(file.exists() for file in others)


def test_what_a_kill_has_left_of_a_folder_goes_with_the_next_attempt(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".transformer.{dead.pid}.tmp").mkdir()
    with new_folder(tmp_path / "transformer") as staging:
        (staging / "weights").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["transformer"]


def test_a_prediction_sweeps_what_an_earlier_one_left(config_file, data_set, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".edit.png.{dead.pid}.tmp"
    left.touch()
    image = str(next((data_set / "control_images").glob("*.png")))
    settings = ["--set", "predict.preprocessing=config", "--steps", "2", "--output", str(tmp_path / "edit.png")]
    assert run("predict", "--config", config_file, "--image", image, "--prompt", "x", *settings) == 0
    assert not left.exists()


def test_a_full_disk_names_the_file_also_of_a_line(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left") as error:
        append_line(tmp_path / "metrics.jsonl", {"step": 1})
    assert error.value.filename == str(tmp_path / "metrics.jsonl")


SECRETS = {
    "https://someone:hunter22@host/x": "hunter22",
    "https://hf_abcdefghijklmnop@host/x": "hf_abcdefghijklmnop",
    "https://u:p@ss@host/x": "p@ss",
    "https://host/x?token=abc123secret&y=1": "abc123secret",
    "https://host/x?X-Amz-Signature=0a1b2c3d4e5f": "0a1b2c3d4e5f",
    "the token is hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567, keep it": "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
}


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_in_addresses_are_taken_out(text):
    assert SECRETS[text] not in redacted(text)
    assert "***" in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        "hf-internal-testing/tiny-flux",
        "/models/hf-checkpoints-a",
        "runs/sk-portraits-2024-with-a-long-name",
        "/data/a@b/c.png",
        "black-forest-labs/FLUX.1-Kontext-dev",
        "https://host/x?page=2",
        "a key=value pair",
        "user@host",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text


def test_a_token_in_an_address_reaches_neither_message_nor_file(config_file, config, tmp_path, capsys):
    secret = "https://me:topsecret99@example.org/model"
    assert run("fit", "--config", config_file, "--set", f"model.pretrained={secret}") == 2
    printed = capsys.readouterr()
    assert "topsecret99" not in printed.out + printed.err
    assert "example.org" in printed.err
    assert "topsecret99" not in yaml.safe_dump(config(f"model.pretrained={secret}").dump())


def test_what_kills_have_left_half_written_is_gone_when_a_run_goes_on(config):
    settings = config("train.max_train_steps=2", "validation.images=0")
    left = [
        settings.run_dir / name
        for name in ("samples/.step-00000001.png.99999999.tmp", "samples/step-00000001/.a.png.99999999.tmp")
    ]
    folder = settings.run_dir / "adapter" / ".pytorch_lora_weights.safetensors.99999999.tmp"
    folder.mkdir(parents=True)
    for file in (*left, folder / "pytorch_lora_weights.safetensors"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"half")
    Trainer(settings).fit()
    assert list(settings.run_dir.rglob("*.tmp")) == []


def test_a_step_that_is_looked_at_again_after_a_full_disk_has_one_line(config, monkeypatch):
    """The run saved itself when its disk was full, behind the line of its validation; found by torture."""
    settings = config(
        "train.max_train_steps=2", "train.checkpoint_every=1", "data.held_out.count=1", "validation.images=1"
    )
    drawn = Journal._draw

    def full(self: Journal, steps_done: int, edits: Sequence[DrawnEdit]) -> Path:
        if steps_done == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "step-00000001.png")
        return drawn(self, steps_done, edits)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_draw", full)
        with pytest.raises(OSError, match="No space left"):
            Trainer(settings).fit()
    assert Trainer(settings).fit().resumed_from == 1
    run = RunFolder(settings.run_dir)
    assert [line["step"] for line in run.validations] == [0, 1, 2]
    assert [line["step"] for line in run.steps] == [1, 2]
