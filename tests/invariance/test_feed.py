"""However samples reach the loop, the loop sees the same batches."""

from __future__ import annotations

import shutil

import pytest
import torch

from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.plan import EpochPlan
from qflux.errors import CheckpointError, Interrupted
from qflux.models import FAMILIES, get_family
from qflux.models.loading import save_checkpoint
from qflux.training.batches import Batches
from qflux.training.distributed import World
from qflux.training.fit import chart

NOT_HERE = ("qwen-image", "qwen-image-2.1")
"""Families without controls, and the one that the quick tests feed."""


def batches(settings) -> list:
    trainer = Trainer(settings)
    dataset, world = trainer.samples(), World()
    course = chart(settings, trainer.pretrained, dataset, world, accept_data_change=False)
    channels = trainer.family.facts.image_channels
    made = Batches(
        settings, course.plan, dataset.training, course.reader, course.levels, channels, world, trainer.device
    )
    return [batch for step in made.steps(0, 4) for batch in step]


def assert_equal(first: list, second: list) -> None:
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert ([s.id for s in a.samples], a.shapes) == ([s.id for s in b.samples], b.shapes)
        for name in ("targets", "controls", "noise", "sigma", "mask", "weight"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        for text, other in zip(a.text, b.text, strict=True):
            assert torch.equal(text.tokens, other.tokens)
            assert text.pooled is None or torch.equal(text.pooled, other.pooled)


@pytest.mark.parametrize("batching", ["data.batch_size=3", "data.max_tokens=900"])
def test_batches_are_the_same_whatever_the_number_of_workers(config, batching):
    overrides = ["data.batch_size=null", batching]
    alone = batches(config(*overrides, "data.num_workers=0"))
    for workers in (1, 5):
        assert_equal(alone, batches(config(*overrides, f"data.num_workers={workers}")))


@pytest.mark.parametrize(
    "name",
    [
        "qwen-image-2.1",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in FAMILIES
            if name not in ("qwen-image", "qwen-image-2.1")
        ),
    ],
)
@pytest.mark.parametrize("batching", [{"batch_size": 3}, pytest.param({"max_tokens": 1500}, marks=pytest.mark.slow)])
def test_batches_are_the_same_with_and_without_the_cache(name, batching, data_set, tmp_path):
    family = get_family(name)
    save_checkpoint(family.tiny(0), tmp_path / "model", family.pipeline)
    settings = {
        "family": name,
        "output_dir": str(tmp_path / "runs"),
        "model": {"pretrained": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(data_set), "processor": {"multi_resolutions": ["96*96", "128*128"]}, **batching},
        "train": {"max_train_steps": 2, "gradient_checkpointing": False},
    }
    cached, live = load_config(settings), load_config(settings, ["cache.use_cache=false", "run_name=live"])
    Trainer(cached).cache()
    assert_equal(batches(cached), batches(live))
    first, second = Trainer(cached).fit(), Trainer(live).fit()
    assert (first.first_loss, first.last_loss) == (second.first_loss, second.last_loss)


def test_every_sample_of_a_token_budget_trains(config):
    settings = config("data.batch_size=null", "data.max_tokens=900", "train.max_train_steps=null", "train.num_epochs=1")
    result = Trainer(settings).fit()
    assert (result.coverage.trained, result.coverage.visits) == (12, 12)


def test_a_sample_beyond_the_token_budget_is_named(config):
    with pytest.raises(Exception, match=r"samples are larger than data.max_tokens 150: .*\(\d+ tokens\)"):
        Trainer(config("data.batch_size=null", "data.max_tokens=150")).fit()


def test_a_resumed_run_plans_no_epoch_of_the_past(config, monkeypatch):
    overrides = ["data.batch_size=null", "data.max_tokens=900", "train.max_train_steps=null", "train.num_epochs=3"]
    settings = config(*overrides, "train.checkpoint_every=1")
    total = None

    def stop(report) -> None:
        nonlocal total
        total = report.total_steps
        if report.epoch == 2:
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        Trainer(settings).fit(stop)
    planned = []
    original = EpochPlan.__init__

    def remember(self, *arguments, epoch, **options):
        planned.append(epoch)
        original(self, *arguments, epoch=epoch, **options)

    monkeypatch.setattr(EpochPlan, "__init__", remember)
    assert Trainer(settings).fit().steps == total
    assert set(planned) == {2}


@pytest.mark.slow
def test_class_images_count_by_their_weight_in_training(config, data_set, tmp_path):
    shutil.copytree(data_set, tmp_path / "class")
    sources = f"data.class_sources=[{{path: {tmp_path / 'class'}}}]"
    overrides = [f"cache.path={tmp_path / 'cache'}", "train.max_train_steps=1", "data.batch_size=24"]
    Trainer(config(sources, *overrides)).cache()
    losses = {
        weight: Trainer(config(sources, *overrides, f"loss.prior_weight={weight}", f"run_name=w{i}")).fit().first_loss
        for i, weight in enumerate((0.0, 1.0, 2.0))
    }
    assert losses[0.0] < losses[1.0] < losses[2.0]
    assert losses[2.0] - losses[1.0] == pytest.approx(losses[1.0] - losses[0.0], rel=1e-4)


def test_a_run_does_not_go_on_with_other_rates(config, data_set):
    def settings(repeats: int):
        return config("data.path=null", f"data.sources=[{{path: {data_set}, repeats: {repeats}}}]")

    Trainer(settings(1)).fit()
    with pytest.raises(CheckpointError, match="how often they train"):
        Trainer(settings(2)).fit()
