"""Fixtures: a small project (data, tiny checkpoint, cache) made once per session, and configs on it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from qflux.commands import Trainer
from qflux.config import Config, load_config
from qflux.demo.data import write_data_set
from qflux.models import get_family
from qflux.models.loading import save_checkpoint

# In the background of a shell Ctrl-C is ignored, and so it would be by what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = ("test_torture", "test_studio", "test_docs", "test_demo", "test_published_sizes", "test_compile")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first: at the end, nobody waits for one of them."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny FLUX Kontext checkpoint in diffusers format."""
    folder = tmp_path_factory.mktemp("checkpoint")
    family = get_family("flux-kontext")
    save_checkpoint(family.tiny(0), folder, family.pipeline)
    return folder


@pytest.fixture(scope="session")
def data_set(tmp_path_factory) -> Path:
    """Twelve samples of six sizes, some with two controls, some with masks."""
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, count=12, seed=1)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory, checkpoint, data_set) -> Path:
    """The filled cache of `data_set`."""
    folder = tmp_path_factory.mktemp("cache")
    Trainer(make_config(checkpoint, data_set, folder, folder)).cache()
    return folder


@pytest.fixture
def config(tmp_path, checkpoint, data_set, cache):
    """A function from overrides to a config on the shared data, checkpoint and cache, with its own output folder."""
    before = entries_of(cache)
    yield lambda *overrides: make_config(checkpoint, data_set, cache, tmp_path / "runs", *overrides)
    # What one test leaves here would fail another one, depending on which process runs it and when.
    assert entries_of(cache) == before, "this test wrote into the shared cache: give it its own (cache.path=null)"


def entries_of(cache: Path) -> set[Path]:
    return {path for folder in ("entries", "samples") for path in (cache / folder).rglob("*.*")}


def make_config(checkpoint: Path, data_set: Path, cache: Path, output: Path, *overrides: str) -> Config:
    return load_config(
        {
            "output_dir": str(output),
            "model": {"pretrained": str(checkpoint), "dtype": "float32", "device": "cpu", "max_sequence_length": 64},
            "data": {
                "path": str(data_set),
                "batch_size": 4,
                "processor": {"multi_resolutions": ["96*96", "128*128", "160*160"]},
            },
            "cache": {"path": str(cache)},
            "lora": {"rank": 4},
            "train": {"max_train_steps": 3, "gradient_checkpointing": False},
        },
        overrides,
    )
