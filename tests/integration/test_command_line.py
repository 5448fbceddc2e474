"""The command line as a user meets it: exit codes, messages, files."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time

import pytest
import yaml
from PIL import Image

from helpers import run
from qflux.main import main as module_main
from worlds import HANG


@pytest.fixture
def config_file(config, tmp_path):
    def write(*overrides: str):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config(*overrides).dump()))
        return str(path)

    return write


def test_cache_fit_and_predict_from_the_command_line(config_file, tmp_path, data_set, capsys):
    path = config_file()
    assert run("cache", "--config", path) == 0
    assert run("fit", "--config", path, "--set", "train.max_train_steps=2") == 0
    adapter = tmp_path / "runs/run/adapter"
    assert (adapter / "pytorch_lora_weights.safetensors").is_file()
    control = str(data_set / "control_images/scene_001.png")
    output = tmp_path / "out/edited.png"
    edit = ["predict", "--config", path, "--image", control, "--prompt", "make it red", "--steps", "2", "--seed", "5"]
    assert run(*edit, "--lora", str(adapter), "--output", str(output)) == 0
    assert Image.open(output).width % 16 == 0
    plain = tmp_path / "out/plain.png"
    assert run(*edit, "--output", str(plain), "--height", "48", "--width", "64") == 0
    assert Image.open(plain).size == (64, 48)
    assert "seed 5" in capsys.readouterr().out


def test_the_module_form_does_the_same(config_file, tmp_path):
    path = config_file()
    assert run("--config", path, "--mode", "cache", entry=module_main) == 0
    arguments = ("--config", path, "--mode", "fit", "--batch_size", "2", "--set", "train.max_train_steps=1")
    assert run(*arguments, entry=module_main) == 0
    saved = yaml.safe_load((tmp_path / "runs/run/config.yaml").read_text())
    assert saved["data"]["batch_size"] == 2


BAD_INPUT = {
    "unknown key": (["fit", "--set", "train.step=3"], "train.step: unknown key"),
    "wrong type": (["fit", "--set", "lora.rank=two"], "lora.rank: 'two'"),
    "impossible value": (["fit", "--set", "data.batch_size=0"], "data.batch_size: 0"),
    "missing data": (["cache", "--set", "data.path=/nowhere"], "/nowhere/training_images"),
    "missing model": (["cache", "--set", "model.pretrained=/nowhere"], "no folder /nowhere"),
    "unknown device": (["fit", "--set", "model.device=abacus"], "'abacus'"),
    "unknown optimizer": (["fit", "--set", "optimizer.class_path=torch.optim.Magic"], "torch.optim.Magic"),
    "optimizer that is none": (["fit", "--set", "optimizer.class_path=os.path.join"], "not a torch optimizer"),
    "wrong optimizer argument": (["fit", "--set", "optimizer.init_args={speed: 3}"], "speed"),
    "no such layers": (["fit", "--set", "lora.target_modules=[to_nothing]"], "to_nothing"),
    "missing lora": (["predict", "--prompt", "x", "--lora", "/nowhere"], "no LoRA file"),
    "missing image": (["predict", "--prompt", "x", "--image", "/nowhere.png"], "/nowhere.png"),
    "half a size": (["predict", "--prompt", "x", "--height", "64"], "--width go together"),
    "odd size": (["predict", "--prompt", "x", "--height", "50", "--width", "64"], "multiples of 16"),
    "unwritable image": (["predict", "--prompt", "x", "--output", "/proc/nope/x.png"], "/proc/nope"),
    "scale without lora": (["predict", "--prompt", "x", "--lora-scale", "3"], "--lora-scale"),
    "absurd size": (["predict", "--prompt", "x", "--height", "160000", "--width", "160000"], "at most 4096x4096"),
    "some unknown layers": (["fit", "--set", "lora.target_modules=[to_q, nope]"], "has no nope"),
    "layers that are not linear": (["fit", "--set", "lora.target_modules=[norm1]"], "lora.target_modules"),
    "unwritable output": (["fit", "--set", "output_dir=/proc/nope"], "/proc/nope"),
    "no image name": (["predict", "--prompt", "x", "--output", "result"], "no image file name"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_exits_with_2_says_what_and_writes_nothing(case, config_file, tmp_path, capsys):
    (command, *arguments), message = BAD_INPUT[case]
    path = config_file()
    before = sorted(tmp_path.rglob("*"))
    assert run(command, "--config", path, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error.replace("\n", "")
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_real_process_prints_no_traceback(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "qflux.cli", "fit", "--config", str(tmp_path / "absent.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert "ConfigError: no config file at" in process.stderr
    assert "Traceback" not in process.stderr


def test_importing_qflux_and_its_command_line_does_not_import_torch():
    check = "import qflux, qflux.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_paths_with_brackets_are_printed_as_they_are(config_file, tmp_path, capsys):
    output = tmp_path / "o[/v1]"
    assert (
        run("fit", "--config", config_file(), "--set", f"output_dir='{output}'", "--set", "train.max_train_steps=1")
        == 0
    )
    assert f"{output}/run/adapter/pytorch_lora_weights.safetensors" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_saves_says_so_and_exits_with_130(config_file, tmp_path):
    command = [sys.executable, "-m", "qflux.cli", "fit", "--config", config_file("train.max_train_steps=100000")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs/run/metrics.jsonl"
    deadline = time.monotonic() + HANG
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert "stopped and saved after step" in error
    assert list((tmp_path / "runs/run/checkpoints").glob("step-*"))


def test_a_full_disk_is_named_and_loses_nothing(config_file, tmp_path, capsys, monkeypatch):
    path = config_file("train.max_train_steps=2", "train.checkpoint_every=1")
    assert run("fit", "--config", path, "--set", "train.max_train_steps=1") == 0
    kept = sorted(p.name for p in (tmp_path / "runs/run/checkpoints").iterdir())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qflux.files.atomic.os.fsync", full)
    assert run("fit", "--config", path) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "runs/run/checkpoints").iterdir()) == kept


@pytest.mark.parametrize("arguments", [["nosuch"], ["fit", "--bogus", "1"], [], ["cache", "nosuch"]])
def test_a_wrong_command_line_is_a_message_and_exit_code_2(arguments, capsys):
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert "Usage" in printed.out + printed.err
    assert "Traceback" not in printed.err


def test_ctrl_c_while_caching_says_how_to_go_on(config_file, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("qflux.cache.build.read_samples", interrupt)
    assert run("cache", "--config", config_file()) == 130
    assert "run the same command again to go on from what is saved" in capsys.readouterr().err
