from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from qflux.data.cache import EmbeddingCacheManager
from qflux.data.store import write_tensors
from qflux.errors import CacheError, CheckpointError, ConfigError, DataError
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.training.trainer import Trainer


@pytest.fixture
def project(config, tmp_path, data_set):
    """A config with its own copy of the data and an empty cache."""
    shutil.copytree(data_set, tmp_path / "data")

    def make(*overrides: str):
        return config(f"data.path={tmp_path / 'data'}", f"cache.path={tmp_path / 'cache'}", *overrides)

    return make


def new_entries(settings) -> int:
    return Trainer(settings).cache().new_entries


def test_a_second_run_computes_nothing(project):
    assert new_entries(project()) > 0
    assert new_entries(project()) == 0


def test_two_fillings_are_byte_identical(project, tmp_path):
    Trainer(project()).cache()
    Trainer(project(f"cache.path={tmp_path / 'other'}")).cache()
    first, second = (
        {p.relative_to(root): p.read_bytes() for p in (root / "entries").rglob("*.safetensors")}
        for root in (tmp_path / "cache", tmp_path / "other")
    )
    assert first == second


def test_equal_images_and_prompts_share_an_entry(project, tmp_path):
    before = new_entries(project())
    for folder, suffix in (("training_images", "png"), ("training_images", "txt"), ("control_images", "png")):
        shutil.copy(tmp_path / f"data/{folder}/scene_001.{suffix}", tmp_path / f"data/{folder}/twin.{suffix}")
    assert before > 0
    assert new_entries(project()) == 0


def test_exactly_what_changed_is_computed_again(project, tmp_path):
    Trainer(project()).cache()
    (tmp_path / "data/training_images/scene_000.txt").write_text("paint it green")
    assert new_entries(project()) == 1
    Image.new("RGB", (192, 192), "teal").save(tmp_path / "data/control_images/scene_000.png")
    assert new_entries(project()) == 1
    images = new_entries(project("data.processor.multi_resolutions=['64*64']"))
    assert images > 12, "every image and mask, no prompt"
    assert new_entries(project("model.max_sequence_length=80")) > 0


def test_renaming_and_moving_the_data_changes_nothing(project, tmp_path):
    Trainer(project()).cache()
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").glob("*/scene_003*"):
        path.rename(path.with_name(path.name.replace("scene_003", "renamed")))
    assert new_entries(project(f"data.path={tmp_path / 'elsewhere'}")) == 0


def test_other_encoder_weights_are_other_entries(project, tmp_path):
    first = new_entries(project())
    save_checkpoint(get_family("flux-kontext").tiny(9), tmp_path / "model", "FluxKontextPipeline")
    masks = 6
    assert new_entries(project(f"model.pretrained={tmp_path / 'model'}")) == first - masks


def test_fit_names_what_the_cache_lacks(project):
    with pytest.raises(CacheError, match=r"12 of 12 samples are not in the cache(.|\n)*scene_000(.|\n)*qflux cache"):
        Trainer(project()).fit()


def test_truncated_entries_count_as_missing_and_are_made_again(project, tmp_path):
    settings = project()
    Trainer(settings).cache()
    damaged = sorted((tmp_path / "cache/entries/image").rglob("*.safetensors"))[:3]
    whole = [entry.read_bytes() for entry in damaged]
    for entry, data in zip(damaged, whole, strict=True):
        entry.write_bytes(data[:100])
    with pytest.raises(CacheError, match="are not in the cache"):
        Trainer(settings).fit()
    assert not settings.run_dir.joinpath("adapter").exists()
    assert Trainer(settings).cache().new_entries == 3
    assert [entry.read_bytes() for entry in damaged] == whole


def test_an_entry_of_the_wrong_shape_is_named_not_trained_on(project, tmp_path):
    settings = project()
    Trainer(settings).cache()
    entries = sorted((tmp_path / "cache/entries/image").rglob("*.safetensors"))
    for entry in entries:
        write_tensors(entry, {"latents": torch.zeros(1, 64)})
    with pytest.raises(CacheError, match=r"\.safetensors has 1 tokens, not"):
        Trainer(settings).fit()
    for entry in entries:
        write_tensors(entry, {"other": torch.zeros(1, 64)})
    with pytest.raises(CacheError, match="it has no tensor latents"):
        Trainer(settings).fit()


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', ""])
def test_a_damaged_index_is_made_again(project, tmp_path, content):
    Trainer(project()).cache()
    (tmp_path / "cache/index.jsonl").write_text(content)
    assert new_entries(project()) == 0


def test_a_file_replaced_with_its_old_time_and_size_is_noticed(project, tmp_path):
    path = tmp_path / "data/control_images/scene_000.png"
    Image.new("RGB", (192, 192), "red").save(tmp_path / "swap.bmp")
    path.unlink()
    shutil.move(tmp_path / "swap.bmp", path.with_suffix(".bmp"))
    Trainer(project()).cache()
    status = path.with_suffix(".bmp").stat()
    Image.new("RGB", (192, 192), "blue").save(path.with_suffix(".bmp"))
    os.utime(path.with_suffix(".bmp"), ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.with_suffix(".bmp").stat().st_size == status.st_size
    assert new_entries(project()) == 1


def test_nothing_is_loaded_when_nothing_is_missing(project, monkeypatch):
    Trainer(project()).cache()
    trainer = Trainer(project())
    monkeypatch.setattr(trainer, "family", replace(trainer.family, load=None))
    report = trainer.cache()
    assert (report.samples, report.new_entries) == (12, 0)


def test_a_first_control_of_another_aspect_ratio_is_mentioned_and_an_extreme_one_refused(project, tmp_path, caplog):
    path = tmp_path / "data/control_images/scene_000.png"
    Image.new("RGB", (192, 120)).save(path)
    Trainer(project()).cache()
    assert "another aspect ratio than their target" in caplog.text
    assert "scene_000.png" in caplog.text
    Image.new("RGB", (2000, 100)).save(path)
    with pytest.raises(DataError, match=r"scene_000\.png is 2000x100"):
        Trainer(project()).cache()


def test_a_checkpoint_that_lacks_something_is_named(project, tmp_path, checkpoint):
    broken = tmp_path / "broken"

    def fault(change) -> str:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(checkpoint, broken)
        change()
        with pytest.raises(CheckpointError) as error:
            Trainer(project(f"model.pretrained={broken}", f"cache.path={tmp_path / 'new'}")).cache()
        return str(error.value)

    def drop_a_weight() -> None:
        file = broken / "text_encoder_2/model.safetensors"
        weights = load_file(file)
        del weights["encoder.block.0.layer.0.SelfAttention.q.weight"]
        save_file(weights, file, {"format": "pt"})

    assert "SelfAttention.q.weight" in fault(drop_a_weight)
    assert "tokenizer holds no vocabulary" in fault((broken / "tokenizer/tokenizer.json").unlink)
    assert "tokenizer_2 can't be loaded" in fault(lambda: (broken / "tokenizer_2/tokenizer.json").write_text("{"))
    assert "no folder vae" in fault(lambda: shutil.rmtree(broken / "vae"))


def test_an_interrupted_write_leaves_no_entry(tmp_path):
    cache = EmbeddingCacheManager(tmp_path)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.ensure("text", "ab" * 32, interrupted)
    assert not cache.has("text", "ab" * 32)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_mask_of_another_size_than_its_target_is_named(project, tmp_path):
    Image.new("L", (50, 50)).save(tmp_path / "data/control_images/scene_000_mask.png")
    with pytest.raises(DataError, match=r"scene_000_mask\.png: the mask and its target differ in size: 50x50"):
        Trainer(project()).cache()


def test_unreadable_images_are_named_before_anything_is_written(project, tmp_path):
    (tmp_path / "data/control_images/scene_004.png").write_bytes(b"broken")
    (tmp_path / "data/training_images/scene_005.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 problems(.|\n)*scene_004\.png(.|\n)*scene_005\.png"):
        Trainer(project()).cache()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["index.jsonl"], "what was read stays read"


def test_extreme_images_are_an_error_or_skipped_and_named(project, tmp_path):
    Image.new("RGB", (400, 40)).save(tmp_path / "data/training_images/scene_001.png")
    with pytest.raises(DataError, match=r"scene_001\.png is 400x40"):
        Trainer(project()).cache()
    report = Trainer(project("data.on_bad_sample=skip")).cache()
    assert report.samples == 11
    assert "scene_001.png" in report.skipped[0]


def test_a_prompt_beyond_the_limit_names_its_sample_or_is_counted(project, tmp_path):
    (tmp_path / "data/training_images/scene_003.txt").write_text("word " * 60)
    with pytest.raises(DataError, match=r"scene_003: a prompt of \d+ tokens is longer than 64"):
        Trainer(project()).cache()
    assert Trainer(project("model.on_long_prompt=truncate")).cache().cut == 1


def test_more_text_than_a_family_takes_is_refused(project):
    with pytest.raises(ConfigError, match="flux-kontext takes at most 512"):
        Trainer(project("model.max_sequence_length=1024"))
