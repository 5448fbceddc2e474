"""A step is what its settings say: how many, on which samples, and what becomes of one that is NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from helpers import fit, lines
from qflux.cli import main
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.demo.data import write_data_set
from qflux.errors import QfluxError
from qflux.losses.objective import Objective
from qflux.training import loop as run_module
from qflux.training.loop import Loop
from qflux.training.step_metrics import Metrics
from worlds import World

HELD_OUT = ["data.held_out={count: 3}", "validation.images=2", "validation.num_inference_steps=2"]


def poison(monkeypatch, visit: int, name: str = "scene_003") -> None:
    """Make the loss of one sample NaN, on one of its visits."""
    original, seen = Objective.__call__, []

    def poisoned(self, prediction, batch, base=None):
        ids = [sample.id for sample in batch.samples]
        if POISONED[name] in ids and torch.is_grad_enabled():
            seen.append(batch)
            if len(seen) == visit:
                place = ids.index(POISONED[name])
                start = sum(batch.target_lengths[:place])
                mask = torch.ones_like(prediction)
                mask[start : start + batch.target_lengths[place]] = math.nan
                prediction = prediction * mask
        return original(self, prediction, batch, base)

    monkeypatch.setattr(Objective, "__call__", poisoned)


POISONED: dict[str, str] = {}


@pytest.fixture
def poisonable(config):
    settings = config("train.max_train_steps=8", "train.preflight=false", "train.ema={decay: 0.9}")
    POISONED.update({sample.name: sample.id for sample in Trainer(settings).samples().training})
    return settings


@pytest.mark.parametrize(("accumulation", "size"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_max_train_steps_7_is_exactly_7_optimizer_steps_whatever_the_accumulation_and_world(
    config, tmp_path, accumulation, size
):
    settings = config(
        "data.batch_size=1",
        "train.max_train_steps=7",
        f"train.gradient_accumulation_steps={accumulation}",
        "train.lr_scheduler=linear",
        "train.lr_warmup_steps=2",
    )
    World(fit, settings, size, tmp_path / "notes").finish()
    optimizer = load_file(settings.run_dir / "checkpoints" / "step-00000007" / "optimizer.safetensors")
    assert {float(tensor) for name, tensor in optimizer.items() if name.endswith("/step")} == {7.0}
    report = lines(settings)
    assert [line["step"] for line in report] == list(range(1, 8))
    expected = [1e-4 * (n / 2 if n < 2 else (7 - n) / 5) for n in range(7)]
    assert [line["learning_rate"] for line in report] == pytest.approx(expected)
    assert all(line["samples"] == accumulation * size for line in report if line["step"] < 12 // (accumulation * size))


def test_an_epoch_is_every_sample_once(config):
    settings = config("data.batch_size=5", "train.max_train_steps=null", "train.num_epochs=2")
    result = Trainer(settings).fit()
    assert result.steps == 6  # 12 samples in steps of 5: three steps, twice
    assert [line["samples"] for line in lines(settings)] == [5, 5, 2] * 2
    assert result.coverage.visits == 24


def test_a_loss_that_is_nan_stops_the_run_with_the_samples_name_after_saving(config, poisonable, monkeypatch):
    with monkeypatch.context() as patch:
        poison(patch, visit=2)
        with pytest.raises(
            QfluxError, match=r"the loss or the gradient is NaN or infinite.*of scene_003\. Saved"
        ) as caught:
            Trainer(poisonable).fit()
    step = int(str(caught.value).split(":")[0].removeprefix("step "))
    saved = poisonable.run_dir / "checkpoints" / f"step-{step - 1:08d}"
    assert (saved / "manifest.json").exists()
    assert [line["step"] for line in lines(poisonable)] == list(range(1, step))
    whole = Trainer(config("run_name=whole", "train.max_train_steps=8", "train.ema={decay: 0.9}")).fit()
    rest = Trainer(poisonable).fit()
    assert rest.resumed_from == step - 1
    assert rest.adapter.read_bytes() == whole.adapter.read_bytes()


def test_a_loss_that_is_nan_is_skipped_and_counted_if_that_is_asked_for(config, poisonable, monkeypatch, caplog):
    settings = poisonable.model_copy(update={"train": poisonable.train.model_copy(update={"on_nan": "skip"})})
    poison(monkeypatch, visit=2)
    result = Trainer(settings).fit()
    assert result.skipped_steps == 1
    assert "is skipped, its loss or gradient is NaN or infinite: scene_003" in caplog.text
    report = lines(settings)
    assert [line["skipped"] for line in report].count(True) == 1
    assert [line["skipped_steps"] for line in report][-1] == 1
    (bad,) = [line for line in report if line["skipped"]]
    assert bad["loss"] == "nan"
    assert all(tensor.isfinite().all() for tensor in load_file(result.adapter).values())


def test_a_tiny_model_overfits_four_mixed_size_samples_and_padded_execution_gives_the_same_curve(
    checkpoint, tmp_path_factory, config
):
    folder = tmp_path_factory.mktemp("four")
    write_data_set(folder / "data", count=4, seed=2)
    curves = {}
    for execution in ("packed", "padded"):
        settings = config(
            f"run_name={execution}",
            f"data.path={folder / 'data'}",
            f"data.held_out={{sources: [{{type: folder, path: {folder / 'data'}}}]}}",
            'data.processor.multi_resolutions=["48*48", "64*64", "80*80"]',
            f"cache.path={folder / 'cache'}",
            "validation.images=0",
            "train.method=full",
            f"train.execution={execution}",
            "train.max_train_steps=60",
            "train.checkpoint_every=20",
            "optimizer.init_args={lr: 0.001}",
        )
        trainer = Trainer(settings)
        trainer.cache()
        assert len({sample.shapes for sample in trainer.samples().training}) > 1
        trainer.fit()
        held_out = [line["held_out_loss"] for line in lines(settings, "validation.jsonl")]
        curves[execution] = (held_out, [line["loss"] for line in lines(settings)])
    held_out, losses = curves["packed"]
    assert held_out[-1] < 0.5 * held_out[0]
    assert held_out == sorted(held_out, reverse=True)
    assert curves["padded"][0] == pytest.approx(held_out, abs=1e-5)
    assert curves["padded"][1] == pytest.approx(losses, abs=1e-5)


def test_metrics_say_what_a_step_was(config):
    settings = config("data.batch_size=4", "train.max_train_steps=3")
    Trainer(settings).fit()
    for line in lines(settings):
        assert line["samples"] == 4
        assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
        assert line["samples_per_second"] == pytest.approx(4 / line["seconds"])
        assert 0 <= line["waiting_seconds"] <= line["seconds"]
        assert 0 < line["padding_avoided"] < 1
        levels = [level for level in line["loss_by_level"] if level is not None]
        assert min(levels) <= line["loss"] <= max(levels)
        assert line["utilisation"] is None  # nobody knows a CPU's peak


@pytest.mark.parametrize("resumed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_first_step_is_not_charged_with_what_comes_before_it(config, resumed, monkeypatch):
    shared = ["data.batch_size=4", "data.held_out={count: 2}", "train.checkpoint_every=1"]
    if resumed:
        Trainer(config(*shared, "train.max_train_steps=1")).fit()
    now = [0.0]

    def taking(seconds, method):
        def longer(*arguments):
            now[0] += seconds
            return method(*arguments)

        return longer

    monkeypatch.setattr("qflux.training.step_metrics.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Loop, "_rehearse", taking(1000, Loop._rehearse))
    monkeypatch.setattr(Loop, "_validate", taking(1000, Loop._validate))
    monkeypatch.setattr(Metrics, "add", taking(1, Metrics.add))
    settings = config(*shared, "train.max_train_steps=3")
    Trainer(settings).fit()
    assert [line["seconds"] for line in lines(settings)[resumed:]] == [1.0] * (3 - resumed)


@pytest.mark.parametrize(("execution", "warns"), [("padded", True), ("packed", False)])
def test_much_padding_in_padded_execution_is_a_warning(config, caplog, monkeypatch, execution, warns):
    settings = config("data.batch_size=6", f"train.execution={execution}", "train.max_train_steps=10")
    monkeypatch.setattr(run_module, "MOST_PADDING", 0.03)
    Trainer(settings).fit()
    shares = {name: np.mean([line[name] for line in lines(settings)]) for name in ("padding_avoided", "padding_ratio")}
    computed, avoided = ("padding_ratio", "padding_avoided") if warns else ("padding_avoided", "padding_ratio")
    assert shares[computed] > 0.03
    assert shares[avoided] == 0
    epochs = {line["epoch"] for line in lines(settings)}
    assert len(epochs) > 1
    for epoch in epochs:
        assert (f"of what was computed in epoch {epoch + 1} is padding" in caplog.text) == warns


def test_the_command_line_says_how_it_ended(config, tmp_path, capsys):
    settings = config(*HELD_OUT, "train.max_train_steps=2")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings.dump()))
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(file)])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "held-out loss" in output
    assert "best checkpoint" in output
    assert load_config(settings.run_dir / "config.yaml") == settings
