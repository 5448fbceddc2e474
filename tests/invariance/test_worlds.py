"""The same recipe walks the same path, whatever the number of processes and however they share the model."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from family_samples import REFERENCES
from qflux.commands import Trainer
from qflux.config import Config, load_config
from qflux.models.loading import save_checkpoint
from qflux.training import loop as run_module
from qflux.training.distributed import full_tensor
from worlds import World

OTHERS = ("qwen-image-edit-plus, 2511", "flux2", "flux3", "qwen-image-2.1")
KINDS = ("flux-kontext", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))
IN_EVERY_WAY = ("flux-kontext", "qwen-image-2.1")
"""Families whose processes are tried in every way; the others show that their batches and modules are shared alike."""
OPTIMIZERS = {
    "SGD": (["optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 0.5}"], 1e-6),
    "AdamW": (["optimizer.class_path=torch.optim.AdamW", "optimizer.init_args={lr: 0.001}"], 1e-4),
}


@pytest.fixture(scope="module", params=KINDS)
def recipe(request, tmp_path_factory, data_set):
    """A function from overrides to a config of one family, with its cache filled."""
    reference = REFERENCES[request.param]
    folder = tmp_path_factory.mktemp(reference.family)
    save_checkpoint(reference.components(0), folder / "model", reference.pipeline_name)
    settings = {
        "family": reference.family,
        "output_dir": str(folder / "runs"),
        "model": {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {
            "path": str(data_set),
            "batch_size": 1,
            "held_out": {"count": 2},
            "processor": {"multi_resolutions": ["96*96", "128*128", "160*160"]},
        },
        "lora": {"rank": 4},
        "loss": {"use_mask_loss": True},
        "train": {
            "max_train_steps": 5,
            "gradient_checkpointing": False,
            "max_grad_norm": 0.05,
            "ema": {"decay": 0.9},
            "preflight": False,
        },
        "validation": {"images": 0, "noise_levels": 1, "num_inference_steps": 2},
    }
    for method in ("lora", "full"):  # where a projection of text trains, what comes before it is cached
        Trainer(load_config(settings, [f"train.method={method}"])).cache()
    return lambda *overrides: load_config(settings, overrides)


def train_and_keep(config: Config, rank: int, kept: Path) -> None:
    """Train, and write down the parameters as this process has them at the end."""
    original = run_module.Loop._finish

    def keep(self, *args):
        save_file(
            {n: full_tensor(p).contiguous() for n, p in self._parts.model.parameters.items()},
            kept / f"{rank}.safetensors",
        )
        return original(self, *args)

    run_module.Loop._finish = keep
    Trainer(config).fit()


def trained(config: Config, size: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The parameters of each process at the end."""
    World(train_and_keep, config, size, folder, folder).finish()
    return [load_file(folder / f"{rank}.safetensors") for rank in range(size)]


def relative_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    flat = [torch.cat([tensors[name].flatten() for name in sorted(tensors)]) for tensors in (first, second)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_accumulating_four_equals_two_accumulating_two(recipe, optimizer, tmp_path):
    settings, tolerance = OPTIMIZERS[optimizer]
    if optimizer == "AdamW" and recipe().family not in IN_EVERY_WAY:
        pytest.skip("cuts and streaming in several processes are tried with two families")
    if recipe().family == "qwen-image-2.1":  # several noises behind one prefix, too
        settings = [*settings, "train.noises_per_sample=2"]
    (start,) = trained(
        recipe(*settings, f"run_name={optimizer}-start", "optimizer.init_args={lr: 0.0}"), 1, tmp_path / "s"
    )
    (alone,) = trained(
        recipe(*settings, f"run_name={optimizer}-alone", "train.gradient_accumulation_steps=4"), 1, tmp_path / "alone"
    )
    assert relative_difference(alone, start) > 100 * tolerance, "training did not move"
    # Once with the micro-batches as they are, and once cut into other passes, with weights that come and go.
    streamed = ["train.tokens_per_pass=700", "train.gradient_checkpointing=true", "train.streamed_blocks=2"]
    cuts = {"ddp": streamed, "fsdp": ["train.tokens_per_pass=500", "train.gradient_checkpointing=true"]}
    looks = ["validation.images=1", "train.preflight=true"]  # which must not disturb
    for way, cut in cuts.items():
        first, second = trained(
            recipe(
                *settings,
                f"run_name={optimizer}-{way}",
                "train.gradient_accumulation_steps=2",
                f"train.distributed={way}",
                *(cut if optimizer == "AdamW" else looks),
            ),
            2,
            tmp_path / way,
        )
        assert all(torch.equal(first[name], second[name]) for name in first), "ranks differ"
        assert relative_difference(alone, first) <= tolerance, way


@pytest.mark.slow
def test_a_rank_with_nothing_to_do_in_the_last_step_of_an_epoch_changes_nothing(recipe, tmp_path):
    """Ten samples in steps of four leave two for the third step; with three processes one has none."""
    if recipe().family not in IN_EVERY_WAY:
        pytest.skip("who has nothing to do does not depend on the family")
    sgd, _ = OPTIMIZERS["SGD"]
    shared = [*sgd, "train.max_train_steps=4", "data.held_out={count: 2}"]
    (alone,) = trained(recipe(*shared, "run_name=three", "train.gradient_accumulation_steps=3"), 1, tmp_path / "alone")
    for way in ("ddp", "fsdp"):
        for member in trained(recipe(*shared, f"run_name=each-{way}", f"train.distributed={way}"), 3, tmp_path / way):
            assert relative_difference(alone, member) <= 1e-6, way


def test_all_weights_train_alike_on_one_process_and_on_shards(recipe, tmp_path):
    sgd, _ = OPTIMIZERS["SGD"]
    shared = [*sgd, "train.method=full", "train.gradient_checkpointing=2", "train.max_train_steps=3"]
    (alone,) = trained(recipe(*shared, "run_name=full", "train.gradient_accumulation_steps=2"), 1, tmp_path / "a")
    shards = trained(recipe(*shared, "run_name=full-fsdp", "train.distributed=fsdp"), 2, tmp_path / "b")
    assert relative_difference(alone, shards[0]) <= 1e-6


@pytest.mark.slow
def test_8_bit_products_are_the_same_on_one_process_and_on_two(recipe, tmp_path):
    """After two steps: rounding makes of a difference in the last digit one of a hundredth, here and there."""
    if recipe().family not in IN_EVERY_WAY:
        pytest.skip("layers that round are the same for all families")
    sgd, _ = OPTIMIZERS["SGD"]
    shared, twice = [*sgd, "train.max_train_steps=2"], "train.gradient_accumulation_steps=2"
    (plain,) = trained(recipe(*shared, "run_name=16-bits", twice), 1, tmp_path / "plain")
    for kind in ("fp8", "int8"):
        precision = f"model.precision={kind}"
        (alone,) = trained(recipe(*shared, precision, f"run_name={kind}", twice), 1, tmp_path / kind)
        assert relative_difference(alone, plain) > 1e-6
        for way in ("ddp", "fsdp"):
            shards = recipe(*shared, precision, f"run_name={kind}-{way}", f"train.distributed={way}")
            first, second = trained(shards, 2, tmp_path / f"{kind}-{way}")
            assert relative_difference(first, second) == 0, way
            assert relative_difference(alone, first) <= 1e-6, way


@pytest.mark.slow
def test_a_run_may_go_on_with_another_number_of_processes(recipe, tmp_path):
    sgd, _ = OPTIMIZERS["SGD"]
    whole_run = recipe(*sgd, "run_name=whole", "train.gradient_accumulation_steps=2", "train.max_train_steps=4")
    (alone,) = trained(whole_run, 1, tmp_path / "a")
    for steps, accumulation, size, way in ((2, 1, 2, "fsdp"), (3, 2, 1, "ddp"), (4, 1, 2, "ddp")):
        config = recipe(
            *sgd,
            "run_name=moved",
            f"train.max_train_steps={steps}",
            f"train.gradient_accumulation_steps={accumulation}",
            f"train.distributed={way}",
        )
        moved = trained(config, size, tmp_path / f"moved-{steps}")
    assert relative_difference(alone, moved[0]) <= 1e-6


@pytest.mark.slow
def test_validation_and_resuming_do_not_disturb_a_sharded_model(recipe, tmp_path):
    """Weights that stay gathered after validation would not see what is written into their shards."""
    if recipe().family not in IN_EVERY_WAY:
        pytest.skip("what is gathered does not depend on the family")
    shared = ["train.ema={decay: 0.9}", "train.method=full", "train.distributed=fsdp", "train.max_train_steps=4"]
    shared.append("validation.images=1")
    rarely, _ = trained(recipe(*shared, "run_name=rarely"), 2, tmp_path / "a")
    often = [*shared, "run_name=often", "train.checkpoint_every=1"]
    trained(recipe(*often, "train.max_train_steps=2"), 2, tmp_path / "b")
    resumed, _ = trained(recipe(*often), 2, tmp_path / "c")
    assert all(torch.equal(rarely[key], resumed[key]) for key in rarely)


@pytest.mark.slow
def test_a_transformer_written_from_shards_has_the_name_of_its_class(recipe, tmp_path):
    config = recipe("run_name=named", "train.method=full", "train.distributed=fsdp", "train.max_train_steps=1")
    trained(config, 2, tmp_path / "a")
    written = json.loads((config.run_dir / "transformer" / "config.json").read_text())
    assert hasattr(diffusers, written["_class_name"])
