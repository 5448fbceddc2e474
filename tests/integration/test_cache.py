from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers import tensors, tree
from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.encode import encode_sample, open_sample
from qflux.cache.filler import CacheFiller, Listener
from qflux.cache.maintenance import verify
from qflux.cache.samples import keys_of, training_variants
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.errors import CacheError, CheckpointError, ConfigError, DataError
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.training.batches import drawn_variant


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
    counts = kinds(tmp_path / "cache")
    images = new_entries(project("data.processor.multi_resolutions=['64*64']"))
    added = kinds(tmp_path / "cache") - counts
    assert added.total() == images
    assert added["mask"] == 6, "every mask"
    assert added["image"] == counts["image"] - 1, "every image, but not the one that was replaced above"
    assert added["text"] == 0
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
    lacking = r"12 of 12 samples are not in the cache(.|\n)*scene_000: image.*text missing(.|\n)*qflux cache"
    with pytest.raises(CacheError, match=lacking):
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


@pytest.mark.parametrize("place", [0.0, 0.02, 0.5, 0.999])
def test_a_flipped_byte_is_an_error_that_names_the_file_never_a_wrong_batch(project, tmp_path, place):
    settings = project("train.num_epochs=1", "train.max_train_steps=null")
    Trainer(settings).cache()
    entry = sorted((tmp_path / "cache/entries/image").rglob("*.safetensors"))[2]
    data = bytearray(entry.read_bytes())
    data[int(place * len(data))] ^= 0x10
    entry.write_bytes(data)
    with pytest.raises(CacheError, match=rf"{entry.name} is damaged(.|\n)*verify --repair"):
        Trainer(settings).fit()


def test_an_entry_of_another_sample_under_this_name_is_named_not_trained_on(project, tmp_path):
    """Its checksum is right, and so is the size that its manifest says."""
    trainer = Trainer(project("train.num_epochs=1", "train.max_train_steps=null"))
    trainer.cache()
    for sample in trainer.samples().from_images:
        trainer.store.write("image", keys_of(sample).target, {"latents": torch.zeros(1, 64)})
        trainer.store.complete(keys_of(sample))
    with pytest.raises(CacheError, match=r"\.safetensors has 1 tokens, not"):
        trainer.fit()
    for sample in trainer.samples().from_images:
        trainer.store.write("image", keys_of(sample).target, {"other": torch.zeros(1, 64)})
        trainer.store.complete(keys_of(sample))
    with pytest.raises(CacheError, match="it has no tensor latents"):
        trainer.fit()


def test_an_entry_copied_over_another_one_is_noticed(project, tmp_path):
    settings = project("train.num_epochs=1", "train.max_train_steps=null")
    Trainer(settings).cache()
    texts = sorted((tmp_path / "cache/entries/text").rglob("*.safetensors"))
    assert texts[0].stat().st_size == texts[1].stat().st_size
    shutil.copy(texts[0], texts[1])
    with pytest.raises(CacheError, match=rf"{texts[1].name} is damaged: it is the entry 'text/{texts[0].stem}'"):
        Trainer(settings).fit()
    assert verify(EmbeddingCacheManager(tmp_path / "cache")).broken.keys() >= {texts[1]}


def test_other_dropout_needs_no_more_than_the_entries_it_lacks(project):
    with_dropout = project("train.caption_dropout=0.1", "train.control_dropout=0.1")
    Trainer(with_dropout).cache()
    assert Trainer(project()).fit().steps == 3
    assert new_entries(project()) == 0
    assert Trainer(with_dropout).samples().training


def test_a_deleted_entry_and_a_deleted_manifest_are_named_and_made_again(project, tmp_path):
    settings = project()
    Trainer(settings).cache()
    before = tree(tmp_path / "cache")
    next((tmp_path / "cache/entries/text").rglob("*.safetensors")).unlink()
    next((tmp_path / "cache/samples").rglob("*.json")).unlink()
    with pytest.raises(CacheError, match="text missing") as error:
        Trainer(settings).fit()
    assert "its manifest missing" in str(error.value)
    assert Trainer(settings).cache().new_entries == 1
    assert tree(tmp_path / "cache") == before


def kinds(cache) -> Counter:
    return Counter(path.parent.parent.name for path in (cache / "entries").rglob("*.safetensors"))


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


def test_a_mask_of_another_size_than_its_target_is_named(project, tmp_path):
    Image.new("L", (50, 50)).save(tmp_path / "data/control_images/scene_000_mask.png")
    with pytest.raises(DataError, match=r"scene_000_mask\.png: the mask and its target differ in size: 50x50"):
        Trainer(project()).cache()


def test_unreadable_images_are_named_before_anything_is_written(project, tmp_path):
    (tmp_path / "data/control_images/scene_004.png").write_bytes(b"broken")
    (tmp_path / "data/training_images/scene_005.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 problems(.|\n)*scene_004\.png(.|\n)*scene_005\.png"):
        Trainer(project()).cache()
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {"index.jsonl", "locks"}, (
        "what was read stays read"
    )


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


def test_fit_opens_no_image_and_needs_no_encoder_on_this_machine(project, tmp_path, checkpoint, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "model")
    settings = project(f"model.pretrained={tmp_path / 'model'}")
    Trainer(settings).cache()
    for part in ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        shutil.rmtree(tmp_path / "model" / part)
    monkeypatch.setattr(Image, "open", lambda *a, **k: pytest.fail("an image was opened"))
    assert Trainer(settings).fit().adapter.is_file()


def test_encoders_that_were_never_seen_are_an_error(project, tmp_path, checkpoint):
    shutil.copytree(checkpoint, tmp_path / "model")
    shutil.rmtree(tmp_path / "model/vae")
    with pytest.raises(CheckpointError, match="has no folder vae"):
        Trainer(project(f"model.pretrained={tmp_path / 'model'}")).fit()


def test_another_dtype_is_another_entry(project):
    first = new_entries(project())
    masks = 6
    assert new_entries(project("model.dtype=bfloat16")) == first - masks
    assert new_entries(project()) == 0


def test_same_prompt_with_different_control_images_gives_different_qwen_embeddings(tmp_path):
    family = get_family("qwen-image-edit-plus")
    save_checkpoint(family.tiny(0), tmp_path / "model", family.pipeline)
    for folder in ("training_images", "control_images"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (96, 96), "white").save(tmp_path / f"data/training_images/{name}.png")
        Image.new("RGB", (96, 96), colour).save(tmp_path / f"data/control_images/{name}.png")
        (tmp_path / f"data/training_images/{name}.txt").write_text("the same words")
    settings = load_config(
        {
            "family": "qwen-image-edit-plus",
            "output_dir": str(tmp_path / "runs"),
            "model": {"pretrained": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
            "data": {"path": str(tmp_path / "data"), "processor": {"target_pixels": 96 * 96}},
        }
    )
    trainer = Trainer(settings)
    trainer.cache()
    first, second = (trainer.store.load(keys_of(sample)) for sample in trainer.samples().from_images)
    assert len(list((settings.cache_dir / "entries/text").rglob("*.safetensors"))) == 2
    assert first.text.tokens.shape == second.text.tokens.shape
    assert not torch.allclose(first.text.tokens, second.text.tokens)
    assert torch.equal(first.target, second.target), "the target is the same image, and shared"


def test_batches_of_one_size_are_encoded_together_and_agree_to_rounding(project, tmp_path):
    alone, together = project(), project("cache.batch_size=4", f"cache.path={tmp_path / 'other'}")
    assert new_entries(alone) == new_entries(together)
    for sample in Trainer(alone).samples().from_images:
        first, second = (Trainer(settings).store.load(keys_of(sample)) for settings in (alone, together))
        for a, b in zip(tensors(first), tensors(second), strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def test_a_failure_counts_only_under_the_settings_it_happened_with(project, tmp_path):
    (tmp_path / "data/training_images/scene_003.txt").write_text("word " * 60)
    Trainer(project("data.on_bad_sample=skip")).cache()
    assert len(Trainer(project("data.on_bad_sample=skip")).samples().training) == 11
    with pytest.raises(CacheError, match=r"1 of 12 samples are not in the cache(.|\n)*scene_003: text missing"):
        Trainer(project("data.on_bad_sample=skip", "model.on_long_prompt=truncate")).samples()


def test_a_prompt_that_was_cut_is_refused_where_cutting_is(project, tmp_path):
    (tmp_path / "data/training_images/scene_003.txt").write_text("word " * 60)
    assert Trainer(project("model.on_long_prompt=truncate")).cache().cut == 1
    with pytest.raises(DataError, match=r"1 of 12 samples can't be encoded(.|\n)*scene_003: its prompt is longer"):
        Trainer(project()).cache()
    with pytest.raises(CacheError, match=r"scene_003: its prompt is longer than allowed and was cut"):
        Trainer(project()).fit()
    assert len(Trainer(project("data.on_bad_sample=skip")).samples().training) == 11
    assert Trainer(project("model.on_long_prompt=truncate")).fit().steps == 3


def test_an_image_replaced_while_caching_is_an_error_not_an_entry(project, tmp_path, monkeypatch):
    """An entry is known by the bytes it was made from; those that are decoded must be those that were hashed."""
    path = tmp_path / "data/control_images/scene_000.png"
    original = CacheFiller._work

    def swap(self, *arguments):
        work = original(self, *arguments)
        Image.new("RGB", (192, 192), "teal").save(path)
        return work

    monkeypatch.setattr(CacheFiller, "_work", swap)
    with pytest.raises(DataError, match=r"scene_000\.png can't be read as an image: it has changed"):
        Trainer(project()).cache()
    monkeypatch.undo()
    assert Trainer(project()).cache().samples == 12


def test_a_data_set_of_which_nothing_can_be_encoded_is_an_error_not_a_loop(project, tmp_path):
    for path in (tmp_path / "data/training_images").glob("*.txt"):
        path.write_text("word " * 60)
    assert Trainer(project("data.on_bad_sample=skip")).cache().samples == 0
    with pytest.raises(DataError, match="no usable sample: all 12 could not be encoded"):
        Trainer(project("data.on_bad_sample=skip")).fit()


def test_one_bad_prompt_in_a_batch_does_not_take_the_others_with_it(project, tmp_path):
    (tmp_path / "data/training_images/scene_003.txt").write_text("word " * 60)
    report = Trainer(project("cache.batch_size=8", "data.on_bad_sample=skip")).cache()
    assert [failure.split(":")[0] for failure in report.failed] == ["scene_003"]
    assert report.samples == 11


def test_what_there_is_to_do_is_said_first_and_too_little_room_stops_it(project, monkeypatch):
    said = []
    Trainer(project()).cache(Listener(estimate=said.append, progress=lambda done, total: said.append((done, total))))
    estimate, *progress = said
    assert (estimate.prompts, estimate.masks) == (9, 6)
    assert estimate.entries == progress[-1][0] == progress[-1][1]
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 1000}))
    with pytest.raises(CacheError, match=r"has 1e-06 GB free, and the cache needs at least .* more"):
        Trainer(project("model.dtype=bfloat16")).cache()


@pytest.mark.parametrize(
    "name",
    [
        "flux-kontext",
        pytest.param("qwen-image-edit-plus", marks=pytest.mark.slow),
        pytest.param("flux2", marks=pytest.mark.slow),
        "qwen-image-2.1",
    ],
)
def test_dropout_trains_on_cached_embeddings_of_the_empty_prompt(name, data_set, tmp_path):
    family = get_family(name)
    save_checkpoint(family.tiny(0), tmp_path / "model", family.pipeline)
    settings = {
        "family": name,
        "output_dir": str(tmp_path / "runs"),
        "model": {"pretrained": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(data_set), "processor": {"target_pixels": 96 * 96}, "batch_size": 4},
        "train": {"caption_dropout": 0.4, "control_dropout": 0.4, "num_epochs": 2, "gradient_checkpointing": False},
    }
    trainer = Trainer(load_config(settings))
    plain = Trainer(load_config(settings, ["train.caption_dropout=0", "train.control_dropout=0"]))
    without = plain.cache().new_entries
    extra = trainer.cache().new_entries
    assert without > 0
    # FLUX's prompt sees no image: one empty prompt serves all. Qwen's does: one per sample, and those without images.
    assert extra == 1 if name.startswith("flux") else extra > 12
    sample = trainer.samples().from_images[0]
    encoder = trainer.pretrained.encoder("text", "image")
    for variant in training_variants(trainer.config):
        cached = trainer.store.load(keys_of(sample), variant)
        live = encode_sample(open_sample(sample, variant), encoder)
        assert torch.equal(cached.text.tokens, live.text.tokens)
        shown = len(sample.images.controls) if variant.controls else 0
        assert len(cached.controls) == len(live.controls) == shown
    assert trainer.fit().steps == 6
    drawn = [drawn_variant(trainer.config, sample, visit) for visit in range(400)]
    assert 0.3 < sum(not variant.caption for variant in drawn) / 400 < 0.5
    assert 0.3 < sum(not variant.controls for variant in drawn) / 400 < 0.5


def test_a_bad_entry_while_training_names_the_sample(config, monkeypatch):
    trainer = Trainer(config("train.max_train_steps=5"))
    victim = trainer.samples().training[7]
    original = trainer.store.load

    def load(keys, variant):
        if keys.id == victim.id:
            raise MemoryError("no room")
        return original(keys, variant)

    monkeypatch.setattr(trainer.store, "load", load)
    with pytest.raises(Exception, match=rf"sample {victim.name} can't be read: MemoryError: no room"):
        trainer.fit()
