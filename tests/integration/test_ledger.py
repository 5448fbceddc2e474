from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest

from qflux.commands import Trainer
from qflux.errors import Interrupted
from qflux.runs.ledger import coverage, read_ledger


def steps_of(settings) -> list[dict]:
    return [line for line in read_ledger(settings.run_dir / "ledger.jsonl") if line["kind"] == "step"]


def test_the_ledger_says_which_samples_trained_in_which_epoch(config):
    settings = config("train.num_epochs=2", "train.max_train_steps=null", "data.batch_size=5")
    result = Trainer(settings).fit()
    lines = steps_of(settings)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for epoch in (0, 1):
        trained = Counter(i for line in lines if line["epoch"] == epoch for i in line["samples"])
        assert trained == Counter(sample.id for sample in Trainer(settings).samples().training)
    assert str(result.coverage) == "12 of 12 samples trained, 24 visits in 2 epochs"


def test_skipped_files_stand_in_the_ledger_with_their_reason(config, data_set, tmp_path):
    shutil.copytree(data_set, tmp_path / "data")
    (tmp_path / "data/training_images/scene_001.txt").unlink()
    image = tmp_path / "data/control_images/scene_002.png"
    image.write_bytes(image.read_bytes()[:-200])  # only decoding finds this out
    settings = config(f"data.path={tmp_path / 'data'}", f"cache.path={tmp_path / 'cache'}", "data.on_bad_sample=skip")
    report = Trainer(settings).cache()
    assert (report.samples, len(report.skipped)) == (10, 2)
    result = Trainer(settings).fit()
    assert result.coverage.samples == 10
    assert "scene_001.png: no prompt" in result.coverage.skipped[0]
    assert "scene_002" in result.coverage.skipped[1]
    assert str(result.coverage).endswith("2 skipped")


def test_a_resumed_run_has_every_step_once(config, monkeypatch):
    settings = config("train.max_train_steps=6", "train.checkpoint_every=2")

    def stop(report) -> None:
        if report.step == 5:
            raise Interrupted("pulled the plug")

    with pytest.raises(Interrupted):
        Trainer(settings).fit(stop)
    with (settings.run_dir / "ledger.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    Trainer(settings).fit()
    assert [line["step"] for line in steps_of(settings)] == [1, 2, 3, 4, 5, 6]
    assert coverage(settings.run_dir / "ledger.jsonl").samples == 12
    assert all(json.loads(line) for line in (settings.run_dir / "ledger.jsonl").read_text().splitlines())
