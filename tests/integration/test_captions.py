"""Several captions of a sample, of which a visit draws one; another prompt for a second text encoder."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
import yaml
from PIL import Image

from helpers import run, tensors, tree
from qflux.cache.encode import encode_sample, open_sample
from qflux.cache.samples import keys_of
from qflux.commands import Trainer
from qflux.config import HubSource, JsonlSource, TableColumns, load_config
from qflux.data.encoded import COMPLETE, Variant
from qflux.data.lint.fix import write_registered
from qflux.data.sources import read_source
from qflux.data.sources.folder import read_folder
from qflux.errors import CacheError, DataError
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.training.batches import drawn_variant

THREE = ("turn the day into night", "make it night", "let the sun go down and the stars come out")


@pytest.fixture
def worded(data_set, tmp_path):
    """The shared data, of which scene_001 has three captions and scene_002 a second prompt."""
    root = tmp_path / "worded"
    shutil.copytree(data_set, root)
    for number, caption in enumerate(THREE):
        suffix = f"_caption_{number}" if number else ""
        (root / f"training_images/scene_001{suffix}.txt").write_text(caption)
    (root / "training_images/scene_002_prompt_2.txt").write_text("a dark sky")
    return root


@pytest.fixture
def project(config, worded):
    return lambda *overrides: config(f"data.path={worded}", "cache.path=null", *overrides)


def named(trainer: Trainer, name: str):
    return next(sample for sample in trainer.samples().all if sample.name == name)


def test_every_caption_is_cached_as_it_is_encoded_without_a_cache(project):
    trainer = Trainer(project("train.control_dropout=0.5", "train.caption_dropout=0.5"))
    trainer.cache()
    encoder = trainer.pretrained.encoder("text", "image")
    sample = named(trainer, "scene_001")
    assert sample.captions == THREE
    variants = keys_of(sample).variants
    assert len(variants) == 3 + 1 + 3 + 1  # each with and without controls; dropped captions are one
    seen = []
    for variant in variants:
        cached = trainer.store.load(keys_of(sample), variant)
        live = encode_sample(open_sample(sample, variant), encoder)
        assert all(torch.equal(a, b) for a, b in zip(tensors(cached), tensors(live), strict=True))
        seen += [cached.text.tokens] if variant.is_complete else []
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert Trainer(trainer.config).cache().new_entries == 0


def test_a_visit_draws_one_caption_and_the_path_does_not_depend_on_the_cache(project):
    trainer = Trainer(project("data.batch_size=6", "train.max_train_steps=6", "run_name=cached"))
    trainer.cache()
    sample = named(trainer, "scene_001")
    drawn = [drawn_variant(trainer.config, sample, visit) for visit in range(600)]
    counts = Counter(variant.number for variant in drawn)
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 150
    assert drawn == [drawn_variant(trainer.config, sample, visit) for visit in range(600)]
    live = Trainer(project("data.batch_size=6", "train.max_train_steps=6", "run_name=live", "cache.use_cache=false"))
    assert trainer.fit().adapter.read_bytes() == live.fit().adapter.read_bytes()


def test_captions_change_what_is_learnt_and_other_samples_stay_in_the_cache(project, worded):
    trainer = Trainer(project("train.max_train_steps=3", "data.batch_size=12", "run_name=three"))
    trainer.cache()
    with_three = trainer.fit().adapter.read_bytes()
    for number in (1, 2):
        (worded / f"training_images/scene_001_caption_{number}.txt").unlink()
    alone = Trainer(project("train.max_train_steps=3", "data.batch_size=12", "run_name=one"))
    assert alone.cache().new_entries == 0  # its first caption is known
    assert alone.fit().adapter.read_bytes() != with_three


def test_the_longest_caption_is_what_a_sample_is_counted_with(data_set, worded, tmp_path):
    """In a family whose prompts have their own lengths."""
    family = get_family("qwen-image-edit-plus")
    save_checkpoint(family.tiny(0), tmp_path / "model", family.pipeline)
    (worded / "training_images/scene_002_prompt_2.txt").unlink()
    settings = {
        "family": "qwen-image-edit-plus",
        "output_dir": str(tmp_path / "runs"),
        "model": {"pretrained": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(worded), "processor": {"target_pixels": 96 * 96}, "batch_size": 12},
        "train": {"max_train_steps": 2},
    }
    trainer = Trainer(load_config(settings))
    trainer.cache()
    sample = named(trainer, "scene_001")
    lengths = [len(trainer.store.load(keys_of(sample), Variant(number=n)).text.tokens) for n in range(3)]
    assert len(set(lengths)) == 3
    manifest = trainer.store.manifest(keys_of(sample))
    assert manifest is not None
    assert manifest.text_tokens == max(lengths)
    assert trainer.fit().steps == 2


def test_another_cache_brings_all_captions_along(project, config, tmp_path):
    first = Trainer(project("run_name=first", "train.max_train_steps=4"))
    first.cache()
    source = f"data.sources=[{{type: cache, path: {first.store.root}}}]"
    second = Trainer(config("data.path=null", source, "cache.path=null", "run_name=second", "train.max_train_steps=4"))
    (stored,) = (sample for sample in second.samples().training if len(sample.captions) > 1)
    assert len(stored.captions) == 3
    assert first.fit().adapter.read_bytes() == second.fit().adapter.read_bytes()
    with pytest.raises(CacheError, match="no embedding without caption"):
        Trainer(second.config.model_copy(update={"train": replaced(second.config.train, caption_dropout=0.1)})).fit()


def replaced(section, **values):
    return section.model_copy(update=values)


def test_a_cache_with_several_captions_is_verified_and_swept_like_any_other(project, tmp_path):
    trainer = Trainer(project())
    trainer.cache()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(trainer.config.dump()))
    before = tree(trainer.store.root)
    assert run("cache", "verify", "--config", tmp_path / "config.yaml") == 0
    assert run("cache", "gc", "--config", tmp_path / "config.yaml") == 0
    assert tree(trainer.store.root).keys() == before.keys()


def test_the_second_prompt_reaches_the_second_encoder_alone(project):
    trainer = Trainer(project())
    trainer.cache()
    sample = named(trainer, "scene_002")
    assert sample.prompt_2 == "a dark sky"
    both = trainer.store.load(keys_of(sample), COMPLETE).text
    encoder = trainer.pretrained.encoder("text", "image")
    alone = encode_sample(open_sample(replace(sample, prompt_2=None)), encoder).text
    instead = encode_sample(open_sample(replace(sample, prompt="a dark sky", prompt_2=None)), encoder).text
    assert torch.equal(both.pooled, alone.pooled)  # CLIP reads the prompt
    assert torch.equal(both.tokens, instead.tokens)  # T5 the second one
    assert not torch.equal(both.tokens, alone.tokens)
    assert trainer.fit().steps == 3


def test_a_second_prompt_that_nobody_reads_is_refused(worded, tmp_path):
    family = get_family("qwen-image-edit-plus")
    save_checkpoint(family.tiny(0), tmp_path / "model", family.pipeline)
    model = {"pretrained": str(tmp_path / "model"), "device": "cpu"}
    settings = load_config({"family": "qwen-image-edit-plus", "model": model, "data": {"path": str(worded)}})
    with pytest.raises(DataError, match=r"a second prompt \(prompt_2\), and qwen-image-edit-plus has one text encoder"):
        Trainer(settings).samples()


def test_folders_name_captions_that_are_missing_empty_or_unclear(worded):
    texts = worded / "training_images"
    (texts / "scene_003_caption_2.txt").write_text("the first is missing")
    (texts / "scene_004_caption_1.txt").write_text(" ")
    (texts / "scene_005_caption_1.txt").write_text("two")
    (texts / "scene_005_prompt_2.txt").write_text("and another")
    (texts / "nothing_caption_1.txt").write_text("of no image")
    listing = read_folder(worded)
    faults = "\n".join(map(str, listing.faults))
    assert "caption 1 is missing (scene_003_caption_1.txt)" in faults
    assert "scene_004_caption_1.txt: the prompt is empty" in faults
    assert "2 captions and a second prompt: it can't be told which of them that belongs to" in faults
    assert "nothing_caption_1.txt: a prompt without an image" in faults
    assert {"scene_003", "scene_004", "scene_005"}.isdisjoint(sample.name for sample in listing.samples)


def test_an_image_called_like_a_caption_has_its_own_prompt(worded):
    Image.new("RGB", (16, 16)).save(worded / "training_images/scene_003_caption_1.png")
    (worded / "training_images/scene_003_caption_1.txt").write_text("its own")
    by_name = {sample.name: sample for sample in read_folder(worded).samples}
    assert by_name["scene_003_caption_1"].prompt == "its own"
    assert by_name["scene_003"].further_captions == ()


def test_tables_have_captions_in_a_list_or_in_columns_and_a_second_prompt(tmp_path):
    rows = [
        {"path_target": "a.png", "prompt": ["one", " two ", ""], "other": "three"},
        {"path_target": "b.png", "prompt": "one", "prompt_2": "second"},
        {"path_target": "c.png", "prompt": ["one", 2]},
        {"path_target": "d.png", "prompt": []},
        {"path_target": "e.png", "prompt": ["one", "two"], "prompt_2": "second"},
    ]
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = TableColumns(captions=("other",))
    listing = read_source(JsonlSource(type="jsonl", path=tmp_path / "table.jsonl", columns=columns))
    first, second = listing.samples
    assert (first.prompt, first.further_captions, first.prompt_2) == ("one", ("two", "three"), None)
    assert (second.prompt, second.further_captions, second.prompt_2) == ("one", (), "second")
    faults = "\n".join(map(str, listing.faults))
    for word in ("prompt is ['one', 2], not text", "prompt is empty", "2 captions and a second prompt"):
        assert word in faults
    without = TableColumns(captions=("other",), prompt_2=None)
    listing = read_source(JsonlSource(type="jsonl", path=tmp_path / "table.jsonl", columns=without))
    assert [sample.prompt_2 for sample in listing.samples] == [None, None, None]


def test_a_hub_data_set_has_them_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    Image.new("RGB", (16, 16), "teal").save(tmp_path / "a.png")
    values = {
        "target_image": ["a.png"] * 3,
        "prompt": [["one", "two"], ["one"], []],
        "prompt_2": [None, "second", None],
    }
    datasets.Dataset.from_dict(values).save_to_disk(str(tmp_path / "set"))
    listing = read_source(HubSource(type="huggingface", path=tmp_path / "set"))
    assert [(s.prompt, s.further_captions, s.prompt_2) for s in listing.samples] == [
        ("one", ("two",), None),
        ("one", (), "second"),
    ]
    assert "prompt is empty" in str(listing.faults[0])


def test_a_copy_in_register_keeps_them(project, tmp_path):
    samples = Trainer(project()).inspect().samples
    write_registered(samples, tmp_path / "fixed")
    found = {sample.name: sample for sample in read_folder(tmp_path / "fixed").samples}
    assert (found["scene_001"].prompt, *found["scene_001"].further_captions) == THREE
    assert found["scene_002"].prompt_2 == "a dark sky"
