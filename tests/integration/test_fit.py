"""`fit` does what its settings say: steps, rates, kinds of adapters, precision, validation, preflight, trackers."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from qflux.cli import main
from qflux.commands import Trainer
from qflux.config import Config, load_config
from qflux.demo.data import write_data_set
from qflux.errors import ConfigError, Interrupted, QfluxError
from qflux.losses.objective import Objective
from qflux.models import FluxTransformer2DModel
from qflux.training import loop as run_module
from qflux.training.preflight import probes
from qflux.training.preflight.rehearsal import Rehearsal
from worlds import World

SGD = ["optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 0.1}"]
HELD_OUT = ["data.held_out={count: 3}", "validation.images=2", "validation.num_inference_steps=2"]


def lines(config: Config, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (config.run_dir / name).read_text().splitlines()]


def fit(config: Config, rank: int) -> None:
    Trainer(config).fit()


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


def poison(monkeypatch, visit: int, name: str = "scene_003") -> None:
    """Make the loss of one sample no number, on one of its visits."""
    original, seen = Objective.__call__, []

    def poisoned(self, prediction, batch):
        ids = [sample.id for sample in batch.samples]
        if POISONED[name] in ids and torch.is_grad_enabled():
            seen.append(batch)
            if len(seen) == visit:
                place = ids.index(POISONED[name])
                start = sum(batch.target_lengths[:place])
                mask = torch.ones_like(prediction)
                mask[start : start + batch.target_lengths[place]] = math.nan
                prediction = prediction * mask
        return original(self, prediction, batch)

    monkeypatch.setattr(Objective, "__call__", poisoned)


POISONED: dict[str, str] = {}


@pytest.fixture
def poisonable(config):
    settings = config("train.max_train_steps=8", "train.preflight=false", "train.ema={decay: 0.9}")
    POISONED.update({sample.name: sample.id for sample in Trainer(settings).samples().training})
    return settings


def test_a_loss_that_is_no_number_stops_the_run_with_the_samples_name_after_saving(config, poisonable, monkeypatch):
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


def test_a_loss_that_is_no_number_is_skipped_and_counted_if_that_is_asked_for(config, poisonable, monkeypatch, caplog):
    settings = poisonable.model_copy(update={"train": poisonable.train.model_copy(update={"on_nan": "skip"})})
    poison(monkeypatch, visit=2)
    result = Trainer(settings).fit()
    assert result.skipped_steps == 1
    assert "is left out, its loss or gradient is no number: scene_003" in caplog.text
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
    started = time.monotonic()
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
            "train.max_train_steps=100",
            "train.checkpoint_every=20",
            "optimizer.init_args={lr: 0.001}",
        )
        trainer = Trainer(settings)
        trainer.cache()
        assert len({sample.shapes for sample in trainer.samples().training}) > 1
        trainer.fit()
        held_out = [line["held_out_loss"] for line in lines(settings, "validation.jsonl")]
        curves[execution] = (held_out, [line["loss"] for line in lines(settings)])
    assert time.monotonic() - started < 240  # two runs
    held_out, losses = curves["packed"]
    assert held_out[-1] < 0.35 * held_out[0]
    assert held_out == sorted(held_out, reverse=True)
    assert curves["padded"][0] == pytest.approx(held_out, abs=1e-5)
    assert curves["padded"][1] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("kind", ["dora", "lokr", "loha"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_adapter_trains_resumes_and_predicts(config, tmp_path, kind, dtype):
    shared = [f"lora.type={kind}", f"model.dtype={dtype}", "cache.path=null", "optimizer.init_args={lr: 0.02}"]
    Trainer(config(*shared)).cache()
    whole = Trainer(config(*shared, "run_name=whole", "train.max_train_steps=4")).fit()
    Trainer(config(*shared, "run_name=part", "train.max_train_steps=2")).fit()
    sizes = ["predict.num_inference_steps=2", "predict.preprocessing=config"]
    settings = config(*shared, "run_name=part", "train.max_train_steps=4", *sizes)
    rest = Trainer(settings).fit()
    assert rest.adapter.read_bytes() == whole.adapter.read_bytes()
    assert {tensor.dtype for tensor in load_file(rest.adapter).values()} == {torch.float32}

    image = Image.effect_noise((96, 96), 80).convert("RGB")
    trainer = Trainer(settings)
    (plain,), (edited,) = (trainer.predict([[image]], ["x"], lora=lora) for lora in (None, rest.adapter))
    assert np.abs(np.asarray(plain, dtype=int) - np.asarray(edited, dtype=int)).max() > 1


def test_full_fine_tuning_writes_a_transformer_that_diffusers_loads_and_predict_uses(config):
    settings = config("train.method=full", "train.max_train_steps=3", *SGD, "predict.num_inference_steps=2")
    result = Trainer(settings).fit()
    assert result.adapter == settings.run_dir / "transformer"
    theirs = diffusers.FluxTransformer2DModel.from_pretrained(result.adapter)
    trained = load_file(settings.run_dir / "checkpoints" / "step-00000003" / "parameters.safetensors")
    assert theirs.state_dict().keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in theirs.state_dict().items())
    before = FluxTransformer2DModel.from_pretrained(Path(settings.model.pretrained) / "transformer").state_dict()
    moved = [name for name, tensor in trained.items() if not torch.equal(tensor, before[name])]
    assert len(moved) > 0.9 * len(trained)

    image = Image.effect_noise((96, 96), 80).convert("RGB")
    replaced = config(f"model.transformer={result.adapter}", "predict.num_inference_steps=2")
    (base,), (tuned,) = (Trainer(c).predict([[image]], ["x"]) for c in (settings, replaced))
    assert np.abs(np.asarray(base, dtype=int) - np.asarray(tuned, dtype=int)).max() > 1


@pytest.mark.parametrize("method", ["lora", "full"])
def test_float16_trains_with_a_loss_scale_and_float32_weights(config, method):
    settings = config("model.dtype=float16", "cache.path=null", f"train.method={method}", "train.max_train_steps=4")
    trainer = Trainer(settings)
    trainer.cache()
    result = trainer.fit()
    assert math.isfinite(result.last_loss)
    saved = settings.run_dir / "checkpoints" / "step-00000004"
    assert json.loads((saved / "state.json").read_text())["loss_scale"]["scale"] > 1
    assert {tensor.dtype for tensor in load_file(saved / "parameters.safetensors").values()} == {torch.float32}
    assert not all(line["skipped"] for line in lines(settings))


def test_full_fine_tuning_in_bf16_keeps_float32_weights_and_writes_bf16(config):
    settings = config("model.dtype=bfloat16", "cache.path=null", "train.method=full", "train.max_train_steps=2")
    trainer = Trainer(settings)
    trainer.cache()
    result = trainer.fit()
    saved = settings.run_dir / "checkpoints" / "step-00000002" / "parameters.safetensors"
    assert {tensor.dtype for tensor in load_file(saved).values()} == {torch.float32}
    assert {t.dtype for f in result.adapter.glob("*.safetensors") for t in load_file(f).values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantized_base_trains_a_lora_close_to_the_one_over_the_plain_base(config, kind):
    shared = [*SGD, "lora.init=kaiming", "train.max_train_steps=3"]
    plain = load_file(Trainer(config(*shared, "run_name=plain")).fit().adapter)
    quantized = load_file(Trainer(config(*shared, f"run_name={kind}", f"model.quantization={kind}")).fit().adapter)
    start = load_file(Trainer(config(*shared, "run_name=s", "optimizer.init_args={lr: 0.0}")).fit().adapter)
    flat = [torch.cat([t.flatten() for _, t in sorted(w.items())]) for w in (plain, quantized, start)]
    moved, apart = (flat[0] - flat[2]).norm(), (flat[0] - flat[1]).norm()
    assert 0 < apart < 0.3 * moved


@pytest.mark.parametrize("every", ["true", "2", "3"])
def test_checkpointing_some_blocks_changes_nothing(config, every):
    first = Trainer(config(*SGD, "run_name=none")).fit().adapter
    second = Trainer(config(*SGD, "run_name=some", f"train.gradient_checkpointing={every}")).fit().adapter
    assert first.read_bytes() == second.read_bytes()


def test_checkpointing_every_second_block_recomputes_every_second_block(config, monkeypatch):
    from qflux.training import model

    calls = []
    original = model.checkpoint
    monkeypatch.setattr(model, "checkpoint", lambda block, *a, **k: calls.append(block) or original(block, *a, **k))
    settings = config("train.gradient_checkpointing=2", "train.max_train_steps=1", "train.preflight=false")
    Trainer(settings).fit()
    transformer = FluxTransformer2DModel.from_pretrained(Path(settings.model.pretrained) / "transformer")
    blocks = len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks)
    assert len(calls) == (blocks + 1) // 2


def test_the_run_ends_with_the_average_if_there_is_one(config):
    settings = config("train.ema={decay: 0.5, warmup: false}", "train.max_train_steps=4", *SGD)
    adapter = load_file(Trainer(settings).fit().adapter)
    average = load_file(settings.run_dir / "checkpoints" / "step-00000004" / "ema.safetensors")
    for name, tensor in average.items():
        assert torch.equal(adapter["transformer." + name.replace(".default.", ".")], tensor)


def test_held_out_loss_is_the_same_for_the_same_weights_and_does_not_disturb_training(config):
    plain = config("run_name=plain", "data.held_out={count: 3}", "validation.images=0", "train.max_train_steps=4")
    often = config("run_name=often", *HELD_OUT, "train.max_train_steps=4", "train.checkpoint_every=1")
    first, second = (Trainer(settings).fit() for settings in (plain, often))
    assert first.adapter.read_bytes() == second.adapter.read_bytes()
    sparse, dense = lines(plain, "validation.jsonl"), lines(often, "validation.jsonl")
    assert [line["step"] for line in sparse] == [0, 4]
    assert [line["step"] for line in dense] == [0, 1, 2, 3, 4]
    assert [dense[0]["held_out_loss"], dense[4]["held_out_loss"]] == [line["held_out_loss"] for line in sparse]
    for line in dense:
        assert np.mean(line["held_out_loss_by_level"]) == pytest.approx(line["held_out_loss"])
    assert dense[0]["held_out_loss"] != dense[4]["held_out_loss"]


def test_the_best_adapter_is_the_one_of_the_lowest_held_out_loss(config):
    """A rate far too high: the first checkpoints are better than the last."""
    settings = config(
        *HELD_OUT,
        "validation.images=0",
        "train.max_train_steps=6",
        "train.checkpoint_every=1",
        "train.keep_checkpoints=1",
        "optimizer.init_args={lr: 0.3}",
    )
    result = Trainer(settings).fit()
    losses = {line["step"]: line["held_out_loss"] for line in lines(settings, "validation.jsonl") if line["step"]}
    best = min(losses, key=losses.get)
    assert result.best == (settings.run_dir / "checkpoints" / f"step-{best:08d}", losses[best])
    kept = sorted(path.name for path in (settings.run_dir / "checkpoints").iterdir())
    assert kept == sorted({f"step-{best:08d}", "step-00000006"})
    parameters = load_file(result.best[0] / "parameters.safetensors")
    adapter = load_file(settings.run_dir / "best" / "pytorch_lora_weights.safetensors")
    assert all(torch.equal(adapter["transformer." + n.replace(".default.", ".")], t) for n, t in parameters.items())


def test_validation_draws_edits_of_different_sizes_as_one_batch_and_measures_their_drift(config):
    settings = config(*HELD_OUT, "validation.images=3", "train.max_train_steps=2")
    Trainer(settings).fit()
    for step in (0, 2):
        grid = settings.run_dir / "samples" / f"step-{step:08d}.png"
        outputs = sorted((settings.run_dir / "samples" / f"step-{step:08d}").glob("*.png"))
        assert grid.is_file()
        assert len(outputs) == 3
        assert len({Image.open(file).size for file in outputs}) > 1
    line = lines(settings, "validation.jsonl")[-1]
    assert {"down", "right", "zoom", "confidence", "name"} == set(line["drifts"][0])


def test_validation_with_guidance_needs_the_empty_prompt_of_held_out_samples_only(config):
    settings = config(*HELD_OUT, "validation.true_cfg_scale=4.0", "cache.path=null", "train.max_train_steps=1")
    plain = config(*HELD_OUT, "cache.path=null", "train.max_train_steps=1", "run_name=plain")
    first = Trainer(plain).cache()
    second = Trainer(settings).cache()
    assert first.new_entries > second.new_entries > 0
    pictures = []
    for one in (plain, settings):
        Trainer(one).fit()
        pictures.append((one.run_dir / "samples" / "step-00000000.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_running_out_of_memory_names_the_largest_batch_and_what_to_change(config, monkeypatch):
    settings = config("data.batch_size=3", "train.max_train_steps=20")
    trainer = Trainer(settings)
    planned = trainer.samples()
    lengths = {s.name: s.tokens for s in planned.training}

    def exhausted(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr("qflux.training.model.TrainedModel.velocity", exhausted)
    with pytest.raises(
        QfluxError, match=r"not enough memory for a micro-batch of \d+ tokens: scene_.*20\.00 GiB"
    ) as caught:
        trainer.fit()
    assert "train.gradient_checkpointing: true" in str(caught.value)
    assert "data.max_tokens: " in str(caught.value)
    named = [name for name in lengths if name in str(caught.value)]
    assert len(named) == 3
    assert not (settings.run_dir / "checkpoints").exists()


def test_too_little_disk_is_found_before_the_first_step(config, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(QfluxError, match=r"checkpoints may take .* MB"):
        Trainer(config()).fit()


def test_preflight_leaves_no_trace_in_the_result(config):
    shared = [
        *HELD_OUT,
        "train.max_train_steps=3",
        "optimizer.class_path=prodigyopt.Prodigy",
        "optimizer.init_args={lr: 1.0}",
    ]
    with_, without = (
        Trainer(config(*shared, f"run_name=preflight-{name}", f"train.preflight={name}")).fit()
        for name in ("true", "false")
    )
    assert with_.adapter.read_bytes() == without.adapter.read_bytes()
    assert not (with_.adapter.parents[1] / "checkpoints" / ".preflight").exists()


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


def test_tensorboard_gets_every_step_once_and_the_pictures(config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shared = ["train.trackers=[tensorboard]", *HELD_OUT, "train.checkpoint_every=2"]
    Trainer(config(*shared, "train.max_train_steps=2")).fit()
    settings = config(*shared, "train.max_train_steps=4")
    Trainer(settings).fit()
    events = EventAccumulator(str(settings.run_dir / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in lines(settings)}, rel=1e-6)
    assert [event.step for event in events.Scalars("validation/held_out_loss")] == [0, 2, 4]
    assert {event.step for event in events.Images("validation/edits")} == {0, 2, 4}


def test_wandb_works_offline(config, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = config("train.trackers=[wandb]", *HELD_OUT)
    Trainer(settings).fit()
    assert list((settings.run_dir / "wandb").glob("offline-run-*/*.wandb"))


def test_swanlab_works_offline(config, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    settings = config("train.trackers=[swanlab]", *HELD_OUT)
    Trainer(settings).fit()
    assert any((settings.run_dir / "swanlab").rglob("*"))


def test_a_package_that_is_missing_is_named_before_anything_is_loaded(config, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.setattr("qflux.commands.load_transformer", lambda *_: pytest.fail("too late"))
    with pytest.raises(
        ConfigError, match=r"train\.trackers: wandb is not installed(.|\n)*pip install 'qflux\[wandb\]'"
    ):
        Trainer(config("train.trackers=[wandb]")).fit()


def interrupted(config: Config, rank: int, number: int) -> None:
    """Rank 1 gets SIGTERM after its second step, nobody else does."""

    def stop(self, loss):
        self.count = getattr(self, "count", 0) + 1
        if rank == 1 and self.count == 2:
            os.kill(os.getpid(), number)

    from qflux.training.optimizer.step import Update

    original = Update.apply
    Update.apply = lambda self, n, loss: (stop(self, loss), original(self, n, loss))[1]
    with pytest.raises(Interrupted, match="stopped and saved after step 2 of 6"):
        Trainer(config).fit()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_stops_all_of_them_at_the_same_step(config, tmp_path, number):
    shared = ["data.batch_size=2", "train.max_train_steps=6"]
    settings = config(*shared, "run_name=stopped")
    World(interrupted, settings, 2, tmp_path / "notes", number).finish()
    assert [path.name for path in (settings.run_dir / "checkpoints").iterdir()] == ["step-00000002"]
    World(fit, settings, 2, tmp_path / "rest").finish()
    whole = config(*shared, "run_name=whole")
    World(fit, whole, 2, tmp_path / "whole").finish()
    adapters = [c.run_dir / "adapter" / "pytorch_lora_weights.safetensors" for c in (settings, whole)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def failing(config: Config, rank: int) -> None:
    with pytest.raises(QfluxError, match="belongs to another configuration" if rank == 0 else "."):
        Trainer(config).fit()


def test_an_error_reaches_every_process(config, tmp_path):
    Trainer(config("train.max_train_steps=1", "data.batch_size=2")).fit()
    changed = config("train.max_train_steps=2", "data.batch_size=2", "lora.rank=8")
    World(failing, changed, 2, tmp_path / "notes").finish(60)


def test_two_runs_on_one_folder_are_refused_on_every_process(config, tmp_path):
    from qflux.files.locks import exclusive

    settings = config()
    with exclusive(settings.run_dir):
        World(refused, settings, 2, tmp_path / "notes").finish(60)


def refused(config: Config, rank: int) -> None:
    with pytest.raises(QfluxError, match="another run" if rank == 0 else "the first process has failed"):
        Trainer(config).fit()


def test_torchrun_and_accelerate_start_it(config, tmp_path):
    import subprocess
    import sys

    settings = config("data.batch_size=1", "train.max_train_steps=2", "run_name=launched")
    file = tmp_path / "config.yaml"
    results = []
    for launcher in (
        ["torch.distributed.run", "--nproc-per-node", "2"],
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"],
    ):
        shutil.rmtree(settings.run_dir, ignore_errors=True)
        file.write_text(yaml.safe_dump(settings.dump()))
        command = [sys.executable, "-m", *launcher, "-m", "qflux.cli", "fit", "--config", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert ended.stdout.count("LoRA: ") == 1, "only the first process speaks"
        assert lines(settings)[0]["samples"] == 2
        results.append((settings.run_dir / "adapter" / "pytorch_lora_weights.safetensors").read_bytes())
    assert results[0] == results[1]


def test_a_wrong_method_for_a_quantized_base_is_a_config_error(config):
    with pytest.raises(ConfigError, match=r"train\.method: full trains every weight"):
        config("model.quantization=nf4", "train.method=full")


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


def test_the_largest_batch_is_tried_with_everything_dropout_could_take_away(config, monkeypatch):
    settings = config("train.control_dropout=0.9", "train.caption_dropout=0.9", "cache.path=null")
    Trainer(settings).cache()
    seen = []
    original = Rehearsal.step
    monkeypatch.setattr(
        Rehearsal, "step", lambda self, batch, *rest: (seen.append(batch), original(self, batch, *rest))
    )
    Trainer(settings).fit()
    (batch,) = seen
    assert all(shapes.controls for shapes in batch.shapes)


def test_what_a_killed_preflight_leaves_does_not_matter(config):
    settings = config()
    torn = settings.run_dir / "checkpoints" / ".preflight" / "step-00000000"
    torn.mkdir(parents=True)
    (torn / "manifest.json").write_text("{}")
    Trainer(settings).fit()
    assert not torn.parent.exists()


def test_a_resumed_run_needs_no_room_for_checkpoints_it_has(config, monkeypatch):
    settings = config("train.max_train_steps=1")
    Trainer(settings).fit()
    there = sum(f.stat().st_size for f in (settings.run_dir / "checkpoints").rglob("*") if f.is_file())
    usage = shutil.disk_usage("/")._replace(free=3 * there)
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda path: usage)
    Trainer(config("train.max_train_steps=2")).fit()


def test_a_run_stopped_at_a_checkpoint_validates_it_when_it_goes_on(config):
    shared = [*HELD_OUT, "validation.images=0", "train.max_train_steps=4", "train.checkpoint_every=2"]
    whole, stopped = config(*shared, "run_name=whole"), config(*shared, "run_name=stopped")

    def stop(report) -> None:
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer(whole).fit()
    with pytest.raises(Interrupted):
        Trainer(stopped).fit(stop)
    Trainer(stopped).fit()
    assert lines(stopped, "validation.jsonl") == lines(whole, "validation.jsonl")
    for settings in (whole, stopped):
        saved = settings.run_dir / "checkpoints" / "step-00000002" / "state.json"
        assert json.loads(saved.read_text())["held_out"] is not None


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [("torchao.optim.AdamW8bit", "{lr: 0.001, block_size: 64}"), ("torch.optim.Muon", "{lr: 0.01}")],
)
def test_optimizers_from_elsewhere_train_and_resume_exactly(config, optimizer, arguments):
    shared = [f"optimizer.class_path={optimizer}", f"optimizer.init_args={arguments}", "lora.rank=64"]
    whole = Trainer(config(*shared, "run_name=whole", "train.max_train_steps=4")).fit()
    Trainer(config(*shared, "run_name=part", "train.max_train_steps=2")).fit()
    rest = Trainer(config(*shared, "run_name=part", "train.max_train_steps=4")).fit()
    assert rest.adapter.read_bytes() == whole.adapter.read_bytes()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss.timesteps.fixed_shift=2.0", "fixed_shift is for shift: fixed"),
        ("loss.timesteps={density: uniform, std: 2.0}", "std is for density: logit_normal"),
        ("loss.timesteps.mode_scale=1.0", "mode_scale is for density: mode"),
        ("train.lr_power=2.0", "lr_power is for lr_scheduler: polynomial"),
        ("train.gradient_checkpointing=1", "2 and more"),
    ],
)
def test_a_setting_without_effect_is_an_error(config, setting, message):
    with pytest.raises(ConfigError, match=message):
        config(setting)
