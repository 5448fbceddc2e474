from __future__ import annotations

import shutil
from collections import Counter

import pytest
from PIL import Image, ImageFile

from qflux.cache.samples import read_samples
from qflux.commands import Trainer
from qflux.data.dataset import gather, require_usable
from qflux.data.images.index import FileIndex
from qflux.errors import DataError
from qflux.models import get_family


@pytest.fixture
def gathered(config, tmp_path):
    """A function from overrides to the samples of a config."""
    index = FileIndex(tmp_path / "index.jsonl")
    return lambda *overrides: gather(config(*overrides).data, get_family("flux-kontext"), index)


def ids(samples) -> list[str]:
    return [sample.id for sample in samples]


def test_ids_come_from_content_not_from_paths_names_or_order(gathered, data_set, tmp_path):
    shutil.copytree(data_set, tmp_path / "moved")
    for path in (tmp_path / "moved").glob("*/scene_*"):
        number = int(path.name[6:9])
        path.rename(path.with_name(f"z{99 - number}{path.name[9:]}"))
    assert ids(gathered(f"data.path={tmp_path / 'moved'}").training) == ids(gathered().training)
    (tmp_path / "moved/training_images/z99.txt").write_text("another prompt")
    assert len(set(ids(gathered(f"data.path={tmp_path / 'moved'}").training)) - set(ids(gathered().training))) == 1


def test_several_sources_each_with_its_rate(gathered, data_set, tmp_path):
    (tmp_path / "extra/training_images").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(tmp_path / "extra/training_images/a.png")
    (tmp_path / "extra/training_images/a.txt").write_text("more")
    sources = f"data.sources=[{{path: {data_set}, repeats: 3}}, {{path: {tmp_path / 'extra'}, weight: 0.5}}]"
    samples = gathered("data.path=null", sources).training
    assert Counter(sample.rate for sample in samples) == {3.0: 12, 0.5: 1}
    assert {sample.source for sample in samples} == {str(data_set), str(tmp_path / "extra")}


def test_equal_samples_become_one_that_trains_as_often_as_all(gathered, data_set):
    sources = f"data.sources=[{{path: {data_set}}}, {{path: {data_set}, repeats: 2}}]"
    result = gathered("data.path=null", sources)
    assert [sample.rate for sample in result.training] == [3.0] * 12
    assert "12 samples are equal to another one" in " ".join(result.notes)


@pytest.mark.parametrize(("setting", "count"), [("{count: 3}", 3), ("{fraction: 0.01}", 1)])
def test_held_out_samples_are_set_apart_whatever_the_seed(gathered, setting, count):
    everything = ids(gathered().training)
    result = gathered(f"data.held_out={setting}")
    assert len(result.held_out) == count
    assert sorted(ids(result.all)) == everything
    assert ids(gathered(f"data.held_out={setting}", "seed=9").held_out) == ids(result.held_out)


def test_holding_out_more_keeps_what_was_held_out(gathered):
    few, many = (ids(gathered(f"data.held_out={{count: {n}}}").held_out) for n in (3, 6))
    assert set(few) < set(many)


def test_a_separate_validation_source_is_used_and_a_leak_is_mentioned(gathered, data_set, tmp_path):
    shutil.copytree(data_set, tmp_path / "val")
    (tmp_path / "val/training_images/scene_000.txt").write_text("unseen")
    result = gathered(f"data.held_out={{sources: [{{path: {tmp_path / 'val'}}}]}}")
    assert (len(result.training), len(result.held_out)) == (12, 12)
    assert "11 held-out samples are also trained on" in " ".join(result.notes)


def test_a_fraction_is_about_that_much_and_adding_data_moves_no_sample(gathered, data_set, tmp_path):
    shutil.copytree(data_set, tmp_path / "more")
    for number in range(200):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(tmp_path / f"more/training_images/n{number}.png")
        (tmp_path / f"more/training_images/n{number}.txt").write_text("x")
    few = gathered("data.held_out={fraction: 0.3}")
    many = gathered("data.held_out={fraction: 0.3}", f"data.path={tmp_path / 'more'}")
    assert set(ids(few.held_out)) <= set(ids(many.held_out))
    assert set(ids(few.training)) <= set(ids(many.training))
    assert 40 < len(many.held_out) < 90


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_what_is_wrong_with_the_config_can_not_be_skipped(gathered, config, data_set, tmp_path, policy):
    for overrides, problem in (
        (["data.held_out={count: 12}"], "it takes 12 of 12 samples"),
        (["data.path=null", f"data.sources=[{{path: {data_set}}}, {{path: {tmp_path / 'gone'}}}]"], "no folder"),
    ):
        overrides.append(f"data.on_bad_sample={policy}")
        with pytest.raises(DataError, match=problem):
            require_usable(gathered(*overrides), config(*overrides).data)


def test_a_class_image_equal_to_a_sample_has_noise_of_its_own(gathered, data_set):
    result = gathered(f"data.class_sources=[{{path: {data_set}}}]", "data.held_out={count: 2}")
    assert len(set(ids(result.training))) == len(result.training) == 22
    assert "2 class images are held-out samples as well" in " ".join(result.notes)


def test_class_images_are_marked_and_never_held_out(gathered, data_set, tmp_path):
    (tmp_path / "class/training_images").mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(tmp_path / f"class/training_images/{number}.png")
        (tmp_path / f"class/training_images/{number}.txt").write_text("a thing")
    result = gathered(f"data.class_sources=[{{path: {tmp_path / 'class'}}}]", "data.held_out={count: 11}")
    assert Counter(sample.is_prior for sample in result.training) == {True: 5, False: 1}
    assert not any(sample.is_prior for sample in result.held_out)


def test_faults_are_an_error_together_or_skipped_by_name(gathered, config, data_set, tmp_path, caplog):
    shutil.copytree(data_set, tmp_path / "data")
    (tmp_path / "data/training_images/scene_001.png").write_bytes(b"broken")
    (tmp_path / "data/training_images/scene_002.txt").unlink()
    (tmp_path / "data/control_images/scene_003.png").unlink()
    (tmp_path / "data/control_images/scene_003.png").symlink_to("scene_003.png")
    path = f"data.path={tmp_path / 'data'}"
    with pytest.raises(DataError, match=r"3 problems(.|\n)*scene_002\.png(.|\n)*scene_001(.|\n)*scene_003(.|\n)*skip"):
        require_usable(gathered(path), config(path).data)
    require_usable(gathered(path), config(path, "data.on_bad_sample=skip").data)
    assert caplog.text.count("skipped: ") == 3
    assert len(gathered(path).training) == 9


def test_nothing_usable_is_an_error_even_if_faults_are_skipped(gathered, config, tmp_path):
    (tmp_path / "data/training_images").mkdir(parents=True)
    (tmp_path / "data/training_images/a.png").write_bytes(b"broken")
    path = (f"data.path={tmp_path / 'data'}", "data.on_bad_sample=skip")
    with pytest.raises(DataError, match=r"no usable sample in .*; 1 were skipped"):
        require_usable(gathered(*path), config(*path).data)


def test_planning_decodes_no_image(config, monkeypatch):
    settings = config()
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("an image was decoded"))
    trainer = Trainer(settings)
    trainer.store.index.path = settings.output_dir / "fresh.jsonl"
    planned = read_samples(settings, trainer.family, trainer.store)
    assert len(planned.training) == 12
    assert trainer.store.index.read > 12
