"""`cache` is killed, shared between processes, and runs out of disk: nothing is lost, nothing is done twice."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from helpers import run, tree
from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.filler import CacheFiller, Listener
from qflux.cache.maintenance import verify
from qflux.commands import Trainer
from qflux.config import Config, load_config
from qflux.demo.data import write_data_set
from worlds import HANG

KILLS = 50


@pytest.fixture(scope="module")
def processes():
    """Processes that have everything imported and nothing computed: a start takes milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qflux.commands"])
    return context


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write_data_set(folder, count=100, seed=3)
    return folder


@pytest.fixture
def settings(data, checkpoint, tmp_path):
    def make(cache: str | Path, data: Path = data) -> Config:
        return load_config(
            {
                "output_dir": str(tmp_path / "runs"),
                "model": {
                    "pretrained": str(checkpoint),
                    "dtype": "float32",
                    "device": "cpu",
                    "max_sequence_length": 64,
                },
                "data": {"path": str(data), "processor": {"multi_resolutions": ["64*64", "96*96"]}, "num_workers": 2},
                "cache": {"path": str(tmp_path / cache)},
                "train": {"caption_dropout": 0.1},
            }
        )

    return make


def fill(config: Config, notes: Path) -> None:
    """A process that fills a cache, and says when it begins to write and how many entries it made."""
    import torch

    torch.set_num_threads(1)
    report = Trainer(config).cache(Listener(estimate=lambda estimate: (notes / "started").touch()))
    (notes / "made").write_text(f"{report.new_entries} {report.reused_entries}")


class Filler:
    """A running `fill`."""

    def __init__(self, processes, config: Config, notes: Path) -> None:
        self.notes = notes
        notes.mkdir(parents=True)
        self.process = processes.Process(target=fill, args=(config, notes))
        self.process.start()

    def wait_until_it_writes(self) -> None:
        self.wait_for((self.notes / "started").exists)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG
        while not condition():
            assert self.process.is_alive(), "it ended too early to prove anything"
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL, "it ended too early to prove anything"

    def made(self) -> tuple[int, int]:
        """New and reused entries, once it has ended well."""
        self.process.join(HANG)
        assert self.process.exitcode == 0
        new, reused = (self.notes / "made").read_text().split()
        return int(new), int(reused)


def sample_count(folder: Path) -> int:
    return len(list((folder / "samples").glob("*/*.json")))


def entry_count(folder: Path) -> int:
    return len(list((folder / "entries").rglob("*.safetensors")))


@pytest.mark.slow
def test_kill_9_at_fifty_moments_ends_in_the_same_bytes_and_verify_is_clean_after_each(settings, processes, tmp_path):
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the children: the number of threads may change the last bit
    whole = settings("whole")
    Trainer(whole).cache()
    torch.set_num_threads(threads)

    killed = settings("killed")
    store = EmbeddingCacheManager(killed.cache_dir)
    moments = random.Random(0)
    done = []
    for number in range(KILLS):
        filler = Filler(processes, killed, tmp_path / f"notes/{number}")
        if number % 10 == 9:
            time.sleep(moments.uniform(0.0, 0.4))  # while reading headers, loading, or before anything at all
        else:
            filler.wait_until_it_writes()
            goal = (done[-1] if done else 0) + moments.randint(0, 4)
            filler.wait_for(lambda goal=goal: entry_count(killed.cache_dir) >= goal)
            time.sleep(moments.uniform(0.0, 0.01))
        filler.kill()
        assert not verify(store).broken
        done.append(entry_count(killed.cache_dir))
    assert len(set(done)) > 10, "the kills hit the run at work"
    assert done[-1] < entry_count(whole.cache_dir)

    new, samples = 0, 0
    for number in range(3):  # and while manifests and the index are written
        filler = Filler(processes, killed, tmp_path / f"notes/end{number}")
        filler.wait_for(lambda goal=samples + 15: sample_count(killed.cache_dir) > goal)
        filler.kill()
        assert not verify(store).broken
        samples = sample_count(killed.cache_dir)
    assert 45 < samples < 100
    new, _ = Filler(processes, killed, tmp_path / "notes/last").made()
    assert new == 0, "what was there is not made again"
    assert tree(killed.cache_dir) == tree(whole.cache_dir)
    assert not verify(store).broken


@pytest.mark.slow
def test_two_processes_on_one_folder_make_every_entry_once(settings, processes, tmp_path):
    shared = settings("shared")
    running = [Filler(processes, shared, tmp_path / f"notes/{number}") for number in range(2)]
    made = [filler.made() for filler in running]
    assert sum(new for new, _ in made) == entry_count(shared.cache_dir)
    assert all(new > 0 for new, _ in made), "both had a share"
    assert {new + reused for new, reused in made} == {entry_count(shared.cache_dir)}
    alone = settings("alone")
    Filler(processes, alone, tmp_path / "notes/alone").made()
    assert tree(alone.cache_dir) == tree(shared.cache_dir)


def test_what_a_dead_process_had_claimed_is_made_by_the_other(settings, processes, tmp_path):
    shared = settings("inherited")
    victim = Filler(processes, shared, tmp_path / "notes/victim")
    victim.wait_until_it_writes()
    heir = Filler(processes, shared, tmp_path / "notes/heir")
    heir.wait_until_it_writes()
    victim.kill()
    heir.made()
    assert not verify(EmbeddingCacheManager(shared.cache_dir)).broken
    assert not Trainer(shared).cache().new_entries


@pytest.mark.slow
def test_torchrun_shares_the_work(settings, tmp_path):
    shared = settings("torchrun")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(shared.dump()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "qflux.cli", "cache", "--config", str(tmp_path / "config.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    made = {int(rank): int(count) for rank, count in re.findall(r"process (\d): .*?: (\d+) entries new", ended.stdout)}
    assert made.keys() == {0, 1}
    assert sum(made.values()) == entry_count(shared.cache_dir)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 200 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a disk can't be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_an_error_that_keeps_what_is_done(settings, data_set, small_disk, tmp_path, monkeypatch, capsys):
    full = settings(small_disk / "cache", data_set)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(full.dump()))
    command = ("cache", "--config", tmp_path / "config.yaml")
    assert run(*command) == 2
    assert "the cache needs at least" in capsys.readouterr().err
    assert entry_count(full.cache_dir) == 0

    monkeypatch.setattr(CacheFiller, "_check_room", lambda self, work: None)
    assert run(*command) == 2
    assert "No space left on device" in capsys.readouterr().err
    done = entry_count(full.cache_dir)
    assert done > 0
    assert not verify(EmbeddingCacheManager(full.cache_dir)).broken
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    assert run(*command) == 0
    assert Trainer(full).cache().reused_entries == entry_count(full.cache_dir) > done


def test_a_read_only_cache_trains_and_refuses_to_grow(settings, data_set, small_disk, tmp_path, capsys):
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    locked = settings(small_disk / "cache", data_set)
    Trainer(locked).cache()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    try:
        config = load_config(locked.dump(), ["train.max_train_steps=2"])
        assert Trainer(config).fit().steps == 2
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(locked.dump() | {"seed": 5}))
        assert run("cache", "--config", tmp_path / "config.yaml") == 2
        assert "Read-only file system" in capsys.readouterr().err
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
