"""Training walks the same path however its samples are split into batches, executed, or interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from qflux.commands import Trainer
from qflux.errors import CheckpointError, Interrupted, QfluxError
from qflux.files.locks import exclusive


def trained(config) -> dict[str, torch.Tensor]:
    return load_file(Trainer(config).fit().adapter)


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


OPTIMIZERS = {
    "SGD": (["optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 0.5}"], 1e-6),
    "AdamW": (["optimizer.class_path=torch.optim.AdamW", "optimizer.init_args={lr: 0.001}"], 1e-4),
}


@pytest.mark.parametrize("normalize", ["true", "false"], ids=["by token", "by image"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_batch_of_four_equals_accumulating_four_one_by_one(config, optimizer, normalize):
    settings, tolerance = OPTIMIZERS[optimizer]
    shared = [*settings, f"loss.normalize_by_valid_tokens={normalize}", "loss.use_mask_loss=true"]
    start = trained(config(*shared, "run_name=start", "optimizer.init_args={lr: 0.0}"))
    batch = trained(config(*shared, "run_name=batch", "data.batch_size=4"))
    single = trained(config(*shared, "run_name=single", "data.batch_size=1", "train.gradient_accumulation_steps=4"))
    assert largest_difference(batch, single) <= tolerance
    assert largest_difference(batch, start) > 20 * tolerance, "training did not move"


@pytest.mark.parametrize("change", ["train.execution=padded", "train.gradient_checkpointing=true"])
def test_how_a_batch_is_executed_does_not_change_the_path(config, change):
    sgd = ["optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 0.5}"]
    plain = trained(config(*sgd, "run_name=plain"))
    assert largest_difference(plain, trained(config(*sgd, change, "run_name=other"))) <= 1e-6


def test_the_same_config_gives_bit_identical_adapters(config):
    first = Trainer(config("run_name=first")).fit().adapter
    second = Trainer(config("run_name=second")).fit().adapter
    assert first.read_bytes() == second.read_bytes()


def test_another_seed_gives_another_adapter(config):
    first, second = trained(config("run_name=first")), trained(config("run_name=second", "seed=1"))
    assert largest_difference(first, second) > 1e-3


def test_a_run_stopped_at_a_checkpoint_continues_bit_identically(config):
    whole = Trainer(config("run_name=whole", "train.max_train_steps=6")).fit()
    Trainer(config("run_name=part", "train.max_train_steps=3")).fit()
    rest = Trainer(config("run_name=part", "train.max_train_steps=6")).fit()
    assert rest.resumed_from == 3
    assert rest.adapter.read_bytes() == whole.adapter.read_bytes()
    runs = rest.adapter.parents[2]
    losses = [
        [json.loads(line)["loss"] for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "part")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_adapter_weights_and_optimizer_state_are_float32_over_a_bf16_base(config):
    settings = config("model.dtype=bfloat16", "cache.path=null", "train.max_train_steps=2")
    trainer = Trainer(settings)
    trainer.cache()
    result = trainer.fit()
    step = settings.run_dir / "checkpoints" / "step-00000002"
    for file in (result.adapter, step / "parameters.safetensors", step / "optimizer.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}


def test_dropout_does_not_keep_a_run_from_continuing_bit_identically(config):
    dropout = "lora.dropout=0.3"
    whole = Trainer(config("run_name=whole", "train.max_train_steps=4", dropout)).fit()
    Trainer(config("run_name=part", "train.max_train_steps=2", dropout)).fit()
    torch.rand(7)
    rest = Trainer(config("run_name=part", "train.max_train_steps=4", dropout)).fit()
    assert rest.adapter.read_bytes() == whole.adapter.read_bytes()


def test_renaming_the_files_does_not_change_the_path(config, tmp_path, data_set):
    shutil.copytree(data_set, tmp_path / "renamed")
    for path in sorted((tmp_path / "renamed").glob("*/scene_*")):
        number = int(path.name[6:9])
        path.rename(path.with_name(path.name.replace(f"scene_{number:03d}", f"picture_{99 - number}")))
    first = Trainer(config("run_name=first")).fit().adapter
    second = Trainer(config("run_name=second", f"data.path={tmp_path / 'renamed'}")).fit().adapter
    assert first.read_bytes() == second.read_bytes()


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_samples(config):
    settings = config(
        "optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 1e30}", "train.max_grad_norm=null"
    )
    with pytest.raises(QfluxError, match=r"step \d: the loss or the gradient is NaN or infinite(.|\n)*scene_\d{3}"):
        Trainer(settings).fit()
    assert not (settings.run_dir / "adapter").exists()


def test_fewer_steps_than_are_done_is_an_error(config):
    Trainer(config("train.max_train_steps=4")).fit()
    with pytest.raises(CheckpointError, match="already trained 4 steps, more than the 2 asked for"):
        Trainer(config("train.max_train_steps=2")).fit()


def test_a_damaged_log_does_not_keep_a_run_from_continuing(config):
    settings = config("train.max_train_steps=2")
    Trainer(settings).fit()
    log = settings.run_dir / "metrics.jsonl"
    log.write_text(log.read_text() + 'not json}\n{"a": 1}\n{"step"')
    Trainer(config("train.max_train_steps=3")).fit()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]


def test_a_folder_belongs_to_one_run_at_a_time(config):
    settings = config()
    with exclusive(settings.run_dir), pytest.raises(QfluxError, match=r"another run \(process \d+\)"):
        Trainer(settings).fit()
    Trainer(settings).fit()


def test_a_stop_signal_is_answered_at_the_end_of_the_step_and_nothing_is_lost(config):
    whole = Trainer(config("run_name=whole", "train.max_train_steps=6")).fit()
    settings = config("run_name=stopped", "train.max_train_steps=6")

    def stop(report) -> None:
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="after step 2 of 6"):
        Trainer(settings).fit(stop)
    rest = Trainer(settings).fit()
    assert rest.resumed_from == 2
    assert rest.adapter.read_bytes() == whole.adapter.read_bytes()
