"""A run trains on its checkpoint's noise schedule; one that began on another stays on that, and says so."""

from __future__ import annotations

import json

import pytest

from qflux.commands import Trainer
from qflux.config import load_config
from qflux.demo.data import write_data_set
from qflux.files.hashing import file_hash
from qflux.losses.timesteps import NoiseShift
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.training.distributed import World
from qflux.training.fit import chart
from qflux.training.resume_guard import NOISE_SHIFT

QWEN = NoiseShift(max_tokens=8192, max_shift=0.9)


@pytest.fixture
def config(tmp_path):
    family = get_family("qwen-image-edit")
    save_checkpoint(family.tiny(0), tmp_path / "model", family.pipeline)
    write_data_set(tmp_path / "data", 4, 0)
    settings = {
        "family": family.name,
        "output_dir": str(tmp_path / "runs"),
        "model": {"pretrained": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(tmp_path / "data"), "batch_size": 2, "processor": {"target_pixels": "64*64"}},
        "train": {"max_train_steps": 2, "gradient_checkpointing": False, "preflight": False},
    }
    Trainer(load_config(settings)).cache()
    return lambda *overrides: load_config(settings, overrides)


def state_of(config):
    folder = sorted((config.run_dir / "checkpoints").glob("step-*"))[-1]
    return folder, json.loads((folder / "state.json").read_text())


def course_of(settings):
    trainer = Trainer(settings)
    return chart(settings, trainer.pretrained, trainer.samples(), World(), accept_data_change=False)


def test_a_new_run_takes_the_checkpoints_schedule_and_records_it(config):
    settings = config()
    Trainer(settings).fit()
    _, state = state_of(settings)
    assert NoiseShift(**state["settings"][NOISE_SHIFT]) == QWEN
    levels = course_of(settings).levels
    assert levels.shift == QWEN
    assert levels.shift.factor(4096, levels.steps) == pytest.approx(2.00, abs=0.01)  # FLUX's would be 3.16


def test_an_old_run_goes_on_with_its_old_schedule_and_says_so(config, caplog):
    settings = config()
    Trainer(settings).fit()
    folder, state = state_of(settings)
    del state["settings"][NOISE_SHIFT]  # as 0.1.0 before this left it
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = [(folder / "state.json").stat().st_size, file_hash(folder / "state.json")]
    (folder / "manifest.json").write_text(json.dumps(manifest))

    longer = config("train.max_train_steps=4")
    course = course_of(longer)
    assert course.levels.shift == NoiseShift()
    assert NOISE_SHIFT not in course.checkpoints.settings
    assert Trainer(longer).fit().resumed_from == 2
    assert "began on a noise schedule with a shift of 0.5 to 1.15 over 256 to 4096 tokens and goes on" in caplog.text
    assert NOISE_SHIFT not in state_of(longer)[1]["settings"], "it stays what it is"


def test_a_run_without_a_resolution_shift_needs_no_scheduler(config):
    course = course_of(config("loss.timesteps.shift=none"))
    assert course.levels.shifted(0.3, 9999) == 0.3
    assert NOISE_SHIFT not in course.checkpoints.settings
