from __future__ import annotations

import shutil

import pytest
from PIL import Image

from qflux.data.cache import EmbeddingCacheManager
from qflux.errors import CacheError, DataError
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
    assert new_entries(project("model.max_sequence_length=24")) > 0


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


def test_a_damaged_entry_is_named_not_trained_on(project, tmp_path):
    settings = project()
    Trainer(settings).cache()
    for entry in (tmp_path / "cache/entries/image").rglob("*.safetensors"):
        entry.write_bytes(entry.read_bytes()[:100])
    with pytest.raises(CacheError, match=r"is damaged"):
        Trainer(settings).fit()
    assert not settings.run_dir.joinpath("adapter").exists()


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
    assert not (tmp_path / "cache").exists()


def test_extreme_images_are_an_error_or_skipped_and_named(project, tmp_path):
    Image.new("RGB", (400, 40)).save(tmp_path / "data/training_images/scene_001.png")
    with pytest.raises(DataError, match=r"scene_001\.png is 400x40"):
        Trainer(project()).cache()
    report = Trainer(project("data.processor.on_extreme_aspect=skip")).cache()
    assert report.samples == 11
    assert "scene_001.png" in report.skipped[0]
