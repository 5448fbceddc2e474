from __future__ import annotations

import json
import shutil

import pytest
import yaml

from helpers import run, tree
from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.maintenance import verify
from qflux.commands import Trainer
from qflux.errors import CacheError
from qflux.files.locks import Claims
from worlds import HANG


@pytest.fixture
def project(config, data_set, cache, tmp_path):
    """A config with its own copies of data and cache, in a file."""
    shutil.copytree(data_set, tmp_path / "data")
    shutil.copytree(cache, tmp_path / "cache")
    settings = config(f"data.path={tmp_path / 'data'}", f"cache.path={tmp_path / 'cache'}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.dump()))
    return settings


def damage(folder) -> None:
    """Flip a byte, cut a file, delete one, garble a manifest."""
    entries = sorted((folder / "entries").rglob("*.safetensors"))
    data = bytearray(entries[3].read_bytes())
    data[-5] ^= 1
    entries[3].write_bytes(data)
    entries[8].write_bytes(entries[8].read_bytes()[:-100])
    entries[12].unlink()
    sorted((folder / "samples").rglob("*.json"))[0].write_text("{")


def test_verify_is_clean_on_a_good_cache_and_changes_nothing(project, tmp_path, capsys):
    before = tree(tmp_path / "cache")
    assert run("cache", "verify", "--config", tmp_path / "config.yaml") == 0
    assert run("cache", "verify", "--path", tmp_path / "cache") == 0
    assert "12 samples: 0 broken" in capsys.readouterr().out
    assert tree(tmp_path / "cache") == before


def test_verify_names_every_damage_and_repair_lets_cache_refill_it(project, tmp_path, capsys):
    before = tree(tmp_path / "cache")
    damage(tmp_path / "cache")
    assert run("cache", "verify", "--config", tmp_path / "config.yaml") == 2
    printed = capsys.readouterr()
    for word in ("do not fit its checksum", "bytes of data, not", "is missing", "is damaged"):
        assert word in printed.out
    assert "--repair" in printed.err
    assert run("cache", "verify", "--config", tmp_path / "config.yaml", "--repair") == 0
    assert not verify(EmbeddingCacheManager(tmp_path / "cache")).broken
    assert Trainer(project).cache().new_entries == 3
    after = tree(tmp_path / "cache")
    assert {name: after.get(name) for name in before if name != "index.jsonl"} == {
        name: data for name, data in before.items() if name != "index.jsonl"
    }


def test_gc_removes_what_no_data_set_refers_to_and_nothing_else(project, tmp_path, capsys):
    prompt = tmp_path / "data/training_images/scene_001.txt"
    old = prompt.read_text()
    prompt.write_text("something else entirely")
    Trainer(project).cache()
    full = tree(tmp_path / "cache")
    assert run("cache", "gc", "--config", tmp_path / "config.yaml", "--dry-run") == 0
    assert tree(tmp_path / "cache") == full
    assert run("cache", "gc", "--config", tmp_path / "config.yaml") == 0
    assert "files would go" in (printed := capsys.readouterr().out)
    assert "files removed" in printed
    gone = sorted(full.keys() - tree(tmp_path / "cache").keys())
    assert {name.split("/")[0] for name in gone} <= {"entries", "samples"}
    assert sum(name.startswith("samples") for name in gone) == 1
    assert Trainer(project).cache().new_entries == 0
    prompt.write_text(old)
    assert Trainer(project).cache().new_entries <= 1


def test_gc_keeps_what_any_of_several_configs_needs(project, tmp_path):
    other = tmp_path / "other.yaml"
    values = project.dump()
    values["data"]["processor"]["multi_resolutions"] = {"target": [64 * 64]}
    other.write_text(yaml.safe_dump(values))
    assert run("cache", "--config", other) == 0
    before = tree(tmp_path / "cache")
    assert run("cache", "gc", "--config", other, "--config", tmp_path / "config.yaml") == 0
    assert tree(tmp_path / "cache").keys() == before.keys()
    assert run("cache", "gc", "--config", other) == 0
    assert len(tree(tmp_path / "cache")) < len(before)


def test_gc_keeps_what_an_interrupted_run_has_made(project, tmp_path):
    entries = len(list((tmp_path / "cache/entries").rglob("*.safetensors")))
    shutil.rmtree(tmp_path / "cache/samples")
    assert run("cache", "gc", "--config", tmp_path / "config.yaml") == 0
    assert len(list((tmp_path / "cache/entries").rglob("*.safetensors"))) == entries
    assert Trainer(project).cache().new_entries == 0


def test_gc_keeps_samples_that_exist_only_here(project, tmp_path):
    values = project.dump()
    values["data"] |= {"path": None, "sources": [{"type": "cache", "path": str(tmp_path / "cache")}]}
    (tmp_path / "stored.yaml").write_text(yaml.safe_dump(values))
    before = tree(tmp_path / "cache")
    assert run("cache", "gc", "--config", tmp_path / "stored.yaml") == 0
    assert tree(tmp_path / "cache") == before


def test_foreign_files_in_a_cache_folder_stay(project, tmp_path):
    for folder in ("tmp/20240101", ".unfinished/notes"):
        (tmp_path / "cache" / folder).mkdir(parents=True)
        (tmp_path / "cache" / folder / "x").write_text("mine")
    (tmp_path / "cache/.unfinished/.DS_Store").write_text("")
    Trainer(project).cache()
    assert run("cache", "gc", "--config", tmp_path / "config.yaml") == 0
    assert len(list((tmp_path / "cache").rglob("x"))) == 2


@pytest.mark.parametrize("change", [("is_cut", True), ("id", "0" * 64), ("img_shapes", [[1, 2, 3]])])
def test_a_changed_manifest_is_noticed_and_made_again(project, tmp_path, change):
    path = sorted((tmp_path / "cache/samples").rglob("*.json"))[0]
    whole = path.read_bytes()
    path.write_text(json.dumps(json.loads(whole) | dict([change])))
    assert path in verify(EmbeddingCacheManager(tmp_path / "cache")).broken
    with pytest.raises(CacheError, match="its manifest missing"):
        Trainer(project).fit()
    assert Trainer(project).cache().new_entries == 0
    assert path.read_bytes() == whole


def test_a_changed_digit_in_the_index_is_noticed(project, tmp_path):
    index = tmp_path / "cache/index.jsonl"
    Trainer(project).cache()
    whole = index.read_text()
    mine = next(line for line in whole.splitlines() if str(tmp_path / "data") in line and '"width": 2' in line)
    index.write_text(whole.replace(mine, mine.replace('"width": 2', '"width": 3')))
    trainer = Trainer(project)
    assert trainer.cache().new_entries == 0
    assert trainer.store.index.read == 1
    assert index.read_text() == whole


def test_gc_on_faulty_data_removes_nothing(project, tmp_path):
    before = tree(tmp_path / "cache")
    (tmp_path / "data/training_images/scene_001.txt").unlink()
    assert run("cache", "gc", "--config", tmp_path / "config.yaml") == 2
    assert tree(tmp_path / "cache").keys() == before.keys()


def test_stats_count_what_is_there(project, tmp_path, capsys):
    assert run("cache", "stats", "--path", tmp_path / "cache") == 0
    printed = capsys.readouterr().out
    assert "12 samples, 0 that could not be encoded, 0 entries without a sample" in printed
    assert "image" in printed


def test_a_cache_that_is_not_there_is_named(tmp_path):
    for command in ("verify", "stats"):
        assert run("cache", command, "--path", tmp_path / "absent") == 2
    assert run("cache", "verify") == 2
    assert run("cache") == 2


def test_cleaning_up_and_filling_do_not_meet(tmp_path):
    from multiprocessing import get_context

    context = get_context("spawn")
    started, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path, started, done))
    process.start()
    try:
        assert started.wait(HANG)
        claims = Claims(tmp_path)
        with pytest.raises(CacheError, match="being filled by another process"), claims.alone():
            pass
        assert not claims.claim("ab" * 20)
        assert claims.claim("cd" * 20)
        with claims.sharing():
            pass
        claims.close()
    finally:
        done.set()
        process.join()


def hold(folder, started, done) -> None:
    claims = Claims(folder)
    with claims.sharing():
        claims.claim("ab" * 20)
        started.set()
        done.wait(HANG)
