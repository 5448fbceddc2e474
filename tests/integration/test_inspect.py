from __future__ import annotations

import json

import pytest
from PIL import Image

from planted import FAULTS, plant, write_pair
from qflux.cli import main
from qflux.commands import Trainer
from qflux.data.lint.inspect import Inspected
from qflux.data.lint.pictures import batch_picture, contact_sheet


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    plant(folder)
    return folder


@pytest.fixture(scope="module")
def inspected(planted, checkpoint, tmp_path_factory) -> Inspected:
    return Trainer(settings(planted, checkpoint, tmp_path_factory.mktemp("inspect"))).inspect()


def settings(folder, checkpoint, output, *overrides):
    from conftest import make_config

    return make_config(checkpoint, folder, output / "cache", output, "model.max_sequence_length=512", *overrides)


@pytest.mark.parametrize(("level", "kind", "where", "what"), FAULTS, ids=lambda value: str(value)[:20])
def test_every_planted_fault_is_found_and_named(inspected, level, kind, where, what):
    found = [f for f in inspected.summary.findings if f.level == level and f.kind == kind and where in f.what]
    assert any(what in finding.detail for finding in found)


def test_good_samples_are_not_suspected(inspected):
    suspects = [f for f in inspected.summary.findings if "good_" in f.what or "good_" in f.detail]
    assert suspects == []


def test_a_consistent_data_set_raises_no_suspicion(config):
    inspected = Trainer(config()).inspect()
    assert [f for f in inspected.summary.findings if f.level != "note"] == []


def test_numbers_add_up(config):
    summary = Trainer(config("data.held_out={count: 2}", "train.gradient_accumulation_steps=2")).inspect().summary
    assert (summary.training, summary.held_out) == (10, 2)
    for counts in (summary.megapixels, summary.aspects, summary.sizes, summary.controls):
        assert sum(counts.values()) == 12
    assert summary.steps_per_epoch == 2
    assert 0 < summary.padding < 0.5
    assert [source.visits for source in summary.sources] == [10]


def test_a_sample_that_can_not_be_decoded_is_not_counted_on(inspected):
    """The planted folder has one, and four samples whose prompt or size is at fault elsewhere."""
    (source,) = inspected.summary.sources
    assert source.samples == inspected.summary.training == source.visits
    assert source.faults == sum(f.kind == "unusable" for f in inspected.summary.findings)
    planned = [visit.sample for step in inspected.plan for visit in step.visits]
    assert len(planned) == inspected.summary.training
    assert "truncated" not in {inspected.samples[i].name for i in planned}


def test_equal_samples_can_be_drawn(checkpoint, tmp_path):
    for name in range(7):
        write_pair(tmp_path / "data", f"p{name}", name, (160, 160))
    for size in (1, 2, 3, 5, 7):
        inspected = Trainer(settings(tmp_path / "data", checkpoint, tmp_path, f"data.batch_size={size}")).inspect()
        assert batch_picture(inspected).width == 980


def test_prompt_lengths_are_estimated_where_there_is_no_tokenizer(config, tmp_path, caplog):
    summary = Trainer(config(f"model.pretrained={tmp_path}")).inspect().summary
    assert summary.text_is_estimated
    assert "prompt lengths are estimated" in caplog.text


def test_a_sample_that_fits_no_micro_batch_is_an_error(config):
    summary = Trainer(config("data.batch_size=null", "data.max_tokens=150")).inspect().summary
    assert {f.kind for f in summary.findings if f.level == "error"} == {"too large"}
    assert summary.steps_per_epoch == 0


def test_pictures_show_the_hardest_images_and_one_batch(inspected):
    sheet, batch = contact_sheet(inspected.samples), batch_picture(inspected)
    assert sheet.width > 1000
    assert batch.width == 980
    assert len(set(sheet.resize((50, 50)).convert("L").tobytes())) > 20, "it is not blank"


def test_the_command_prints_tables_and_writes_json_and_pictures(planted, checkpoint, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(settings(planted, checkpoint, tmp_path).dump()))
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--config", str(config), "--json", str(tmp_path / "found.json")])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for title in ("Sources", "Targets by size", "Training sizes", "Findings", "padding avoided", "steps per epoch"):
        assert title in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["findings"]) > len(FAULTS)
    for name in ("contact_sheet.png", "batch.png"):
        Image.open(tmp_path / "run/inspect" / name).verify()


def test_a_data_set_without_one_usable_sample_is_still_described(checkpoint, tmp_path):
    (tmp_path / "data/training_images").mkdir(parents=True)
    (tmp_path / "data/training_images/a.png").write_bytes(b"x")
    inspected = Trainer(settings(tmp_path / "data", checkpoint, tmp_path)).inspect()
    assert inspected.summary.training == 0
    assert inspected.summary.count("error") == 1
    assert contact_sheet([]) is None
    assert batch_picture(inspected) is None
