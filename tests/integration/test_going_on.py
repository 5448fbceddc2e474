"""Going on: from another LoRA, with other data, for longer; and own edits to watch meanwhile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from helpers import lines, tree
from qflux.adapters.attach import Weighted
from qflux.commands import Trainer
from qflux.errors import CheckpointError, ConfigError, DataError
from qflux.runs.ledger import coverage
from qflux.sampling.predictor import Edit

SGD = ["optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 0.5}"]


def velocity(config, adapters=()) -> np.ndarray:
    made = Trainer(config("predict.preprocessing=config", "predict.num_inference_steps=2")).predictor(adapters)
    image = Image.fromarray(np.random.default_rng(3).integers(0, 255, (96, 96, 3), dtype=np.uint8))
    ((latents, _),) = made.latents([Edit((image,), "make it red")])
    return latents.numpy()


# Start from a LoRA


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("lora", ["lora.rank=4"], ["lora.rank=4"]),
        ("lora", ["lora.rank=4", "lora.alpha=8"], ["lora.rank=6", "lora.alpha=3"]),
        ("lora", ["lora.rank=4"], ["lora.rank=4", "lora.target_modules=[to_q, to_k, to_v, to_out.0, proj_mlp]"]),
        ("dora", ["lora.rank=4", "lora.type=dora"], ["lora.rank=8", "lora.type=dora"]),
        ("lokr", ["lora.rank=4", "lora.type=lokr"], ["lora.rank=4", "lora.type=lokr"]),
    ],
)
def test_a_run_that_starts_from_a_lora_computes_what_that_one_did(kind, before, after, config, tmp_path):
    first = Trainer(config("run_name=first", "train.max_train_steps=4", *SGD, *before)).fit().adapter
    # A learning rate of nothing: what comes out is what went in.
    still = ["optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 0.0}", "train.max_train_steps=1"]
    second = Trainer(config("run_name=second", f"lora.init_from={first.parent}", *still, *after)).fit().adapter
    base, one, other = (velocity(config, adapters) for adapters in ([], [Weighted(first)], [Weighted(second)]))
    assert np.abs(one - base).max() > 1e-3
    assert np.abs(one - other).max() < 1e-5


def test_it_is_read_once_and_a_run_that_goes_on_does_not_need_it(config, tmp_path):
    first = Trainer(config("run_name=first", "train.max_train_steps=2")).fit().adapter
    copy = tmp_path / "start.safetensors"
    shutil.copy(first, copy)
    settings = [f"lora.init_from={copy}", "run_name=second"]
    whole = Trainer(config(*settings, "run_name=whole", "train.max_train_steps=4")).fit().adapter
    Trainer(config(*settings, "train.max_train_steps=2")).fit()
    copy.unlink()
    resumed = Trainer(config(*settings, "train.max_train_steps=4")).fit()
    assert resumed.resumed_from == 2
    for name, tensor in load_file(whole).items():
        assert torch.equal(tensor, load_file(resumed.adapter)[name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora.rank=2"], "is of rank 4.*\n.*set lora.rank to 4 or more"),
        (["lora.target_modules=[to_q]"], "which does not train.*\n.*lora.target_modules"),
        (["lora.type=dora"], "is a lora.*\n.*lora.type"),
        (["lora.type=loha"], "is no loha"),
        (["lora.init_from=nowhere"], "no LoRA file at nowhere"),
    ],
)
def test_a_start_that_does_not_fit_is_an_error(settings, message, config):
    first = Trainer(config("run_name=first", "train.max_train_steps=1")).fit().adapter
    with pytest.raises(CheckpointError, match=message):
        Trainer(config("run_name=second", f"lora.init_from={first}", *settings)).fit()


# Other data


def changed(data_set: Path, root: Path) -> Path:
    """The same data: one sample more, one less, one with another prompt."""
    shutil.copytree(data_set, root)
    targets, controls = root / "training_images", root / "control_images"
    gone, other, *_ = sorted(file.stem for file in targets.glob("*.png") if "_mask" not in file.stem)
    for folder in (targets, controls):
        for file in [*folder.glob(f"{gone}.*"), *folder.glob(f"{gone}_*")]:
            file.unlink()
    (targets / f"{other}.txt").write_text("something else")
    for folder in (targets, controls):
        Image.new("RGB", (96, 96), "teal").save(folder / "newcomer.png")
    (targets / "newcomer.txt").write_text("make it teal")
    return root


def test_a_run_goes_on_with_other_data_if_that_is_agreed_to(config, data_set, tmp_path, caplog):
    mine = ["cache.path=null", "data.batch_size=5"]
    Trainer(config(*mine)).cache()
    Trainer(config(*mine, "train.max_train_steps=4")).fit()  # three steps are an epoch
    settings = config(*mine, f"data.path={changed(data_set, tmp_path / 'data')}", "train.max_train_steps=10")
    Trainer(settings).cache()
    with pytest.raises(CheckpointError) as raised:
        Trainer(settings).fit()
    said = str(raised.value)
    assert "up to step 4: 1 new (newcomer); 1 gone (scene_000); 1 changed (scene_001)" in said
    assert "--accept-data-change" in said
    result = Trainer(settings).fit(accept_data_change=True)
    assert (result.steps, result.resumed_from) == (10, 4)
    assert any("a new epoch begins" in record.message for record in caplog.records)
    lines = [json.loads(line) for line in (settings.run_dir / "ledger.jsonl").read_text().splitlines()]
    names = {line["id"]: line["name"] for line in lines if line["kind"] == "sample"}
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    assert sorted(steps) == list(range(1, 11))
    new_epoch = [sample for step in (5, 6, 7) for sample in steps[step]["samples"]]
    assert sorted(names[sample] for sample in new_epoch) == sorted(names.values()), "each sample once"
    assert len({steps[step]["epoch"] for step in (5, 6, 7)}) == 1
    assert coverage(settings.run_dir / "ledger.jsonl").trained == 12
    again = Trainer(settings.model_copy(update={"train": settings.train.model_copy(update={"max_train_steps": 11})}))
    assert again.fit().resumed_from == 10, "agreed to once, it is the run's data"


def test_other_settings_are_still_errors(config, data_set, tmp_path):
    mine = ["cache.path=null"]
    Trainer(config(*mine)).cache()
    Trainer(config(*mine, "train.max_train_steps=1")).fit()
    with pytest.raises(CheckpointError, match=r"data.batch_size was 4, is 3"):
        Trainer(config(*mine, "data.batch_size=3", "train.max_train_steps=2")).fit(accept_data_change=True)


# For longer


@pytest.mark.parametrize("scheduler", ["cosine", "linear", "polynomial", "constant"])
def test_a_run_can_be_made_longer_under_any_schedule_and_says_what_becomes_of_it(scheduler, config, caplog):
    shared = [f"train.lr_scheduler={scheduler}", "optimizer.init_args={lr: 0.001}"]
    first = Trainer(config(*shared, "train.max_train_steps=3")).fit()
    settings = config(*shared, "train.max_train_steps=6")
    result = Trainer(settings).fit()
    assert (result.resumed_from, result.steps) == (3, 6)
    assert result.first_loss == first.first_loss, "the loss of the whole run"
    told = [record.message for record in caplog.records if "was planned for 3 steps" in record.message]
    rates = [
        json.loads(line)["learning_rate"] for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    if scheduler == "constant":
        assert not told
        assert set(rates) == {0.001}
        return
    (said,) = told
    assert f"lr_scheduler {scheduler}" in said
    whole = Trainer(config(*shared, "run_name=whole", "train.max_train_steps=6"))
    whole.fit()
    planned = [
        json.loads(line)["learning_rate"] for line in (whole.config.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert rates[3:] == planned[3:], "from here on it is the longer run's schedule"


# Own edits


def test_own_edits_are_drawn_without_held_out_data(config, tmp_path):
    for number, size in enumerate(((90, 60), (64, 128))):
        Image.new("RGB", size, "teal").save(tmp_path / f"照片{number}.png")
    one, two = (str(tmp_path / f"照片{number}.png") for number in range(2))
    both = f"{{prompt: both, images: [{two}, {one}], name: mine}}"
    edits = f"[{{prompt: 变成夜晚, images: {one}}}, {both}, {{prompt: words}}]"
    drawn = [f"validation.edits={edits}", "validation.num_inference_steps=1", "train.checkpoint_every=1"]
    plain = Trainer(config("run_name=plain", "train.max_train_steps=2")).fit()
    settings = config(*drawn, "train.max_train_steps=2")
    result = Trainer(settings).fit()
    assert result.adapter.read_bytes() == plain.adapter.read_bytes(), "watching changes nothing"
    samples = settings.run_dir / "samples"
    assert sorted(file.name for file in samples.glob("step-*.png")) == [f"step-0000000{n}.png" for n in range(3)]
    described = json.loads((samples / "step-00000002" / "edits.json").read_text())["edits"]
    assert [item["name"] for item in described] == ["照片0.png", "mine", "edit 3"]
    assert "control 2" in described[1]
    assert "control" not in described[2]
    assert all("wanted" not in item for item in described)
    control = Image.open(samples / "step-00000002" / described[0]["control"])
    assert np.ptp(np.asarray(control)[..., 1]) == 0, "as it was given, not through the VAE"
    assert "变成夜晚" in (settings.run_dir / "report.html").read_text()


def test_own_edits_of_one_name_are_told_apart(config, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (64, 64), "teal").save(tmp_path / folder / "p.png")
    edits = ", ".join(f"{{prompt: x, images: {tmp_path / folder / 'p.png'}}}" for folder in ("a", "b", "a"))
    settings = config(f"validation.edits=[{edits}]", "validation.num_inference_steps=1", "train.max_train_steps=1")
    Trainer(settings).fit()
    from qflux.runs.folder import RunFolder

    found = RunFolder(settings.run_dir).edits
    assert [edit.name for edit in found] == ["p.png", "p.png #2", "p.png #3"]
    assert all([step for step, _ in edit.outputs] == [0, 1] for edit in found)


@pytest.mark.slow
def test_held_out_edits_show_what_was_given(config):
    settings = config("data.held_out={count: 12}", "validation.images=9", "train.max_train_steps=1")
    with pytest.raises(DataError, match="none would be left"):
        Trainer(settings).fit()
    settings = config("data.held_out={count: 8}", "validation.images=8", "train.max_train_steps=1")
    Trainer(settings).fit()
    samples = settings.run_dir / "samples" / "step-00000001"
    described = json.loads((samples / "edits.json").read_text())["edits"]
    assert any("control 2" in item for item in described)
    assert any("mask" in item for item in described)
    ledger = Trainer(settings).samples()
    by_name = {sample.name: sample for sample in ledger.held_out}
    for item in described:
        sample = by_name[item["name"]]
        control = sample.images.controls[0]
        given = control.transform(Image.open(control.ref.path).convert("RGB"))
        assert np.array_equal(Image.open(samples / item["control"]), given)


def test_an_own_image_that_is_missing_is_found_before_anything_is_loaded(config):
    with pytest.raises(DataError, match=r"nowhere.png can't be read"):
        Trainer(config("validation.edits=[{prompt: x, images: nowhere.png}]")).fit()
    with pytest.raises(ConfigError, match=r"validation\.edits"):
        config("validation.edits=[{images: nowhere.png}]")


def test_a_run_goes_on_from_a_chosen_checkpoint_of_another(config):
    """The steps after it are the same as they were, to the last byte; the run it comes from is not touched."""
    shared = ("train.max_train_steps=6", "train.checkpoint_every=2", "train.keep_checkpoints=5")
    whole = Trainer(config(*shared, "run_name=whole")).fit()
    chosen = config("run_name=whole").run_dir / "checkpoints" / "step-00000002"
    before = tree(chosen.parent)
    again = Trainer(config(*shared, "run_name=again", f"train.resume_from={chosen}")).fit()
    assert again.resumed_from == 2
    assert again.adapter.read_bytes() == whole.adapter.read_bytes()
    assert tree(chosen.parent) == before
    assert Trainer(config(*shared, "run_name=again", "train.resume_from=/nowhere")).fit().resumed_from == 6


def test_what_is_no_checkpoint_is_named_with_those_that_are(config):
    Trainer(config("run_name=whole", "train.max_train_steps=2", "train.checkpoint_every=1")).fit()
    folder = config("run_name=whole").run_dir / "checkpoints"
    with pytest.raises(CheckpointError, match="no such folder") as caught:
        Trainer(config("run_name=other", f"train.resume_from={folder / 'step-00000009'}")).fit()
    assert "step-00000001, step-00000002" in caught.value.remedy
    (folder / "step-00000001" / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="is not what the manifest says"):
        Trainer(config("run_name=other", f"train.resume_from={folder / 'step-00000001'}")).fit()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Trainer(config("run_name=other", f"train.resume_from={folder}")).fit()


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4, 5]), (4, [0, 4, 5]), (None, [0, 2, 4, 5])])
def test_validation_has_an_interval_of_its_own(config, every, steps):
    length = ("train.max_train_steps=5", "train.checkpoint_every=2", "train.keep_checkpoints=9")
    shared = (*length, "data.held_out={count: 2}")
    quick = ("validation.images=0", "train.preflight=false")
    plain = Trainer(config(*shared, *quick, "run_name=plain")).fit()
    settings = config(*shared, *quick, f"validation.every={every or 'null'}", "run_name=own")
    result = Trainer(settings).fit()
    assert [line["step"] for line in lines(settings, "validation.jsonl")] == steps
    assert result.adapter.read_bytes() == plain.adapter.read_bytes()
    saved = sorted(folder.name for folder in (settings.run_dir / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004", "step-00000005"]


def test_an_interval_without_anything_to_validate_is_refused(config):
    with pytest.raises(ConfigError, match="nothing is held out"):
        config("validation.every=2")
