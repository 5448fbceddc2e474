"""Every kind of adapter, every precision and every optimizer trains, resumes and is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from helpers import lines
from qflux.adapters.files import read_adapter
from qflux.commands import Trainer
from qflux.errors import ConfigError
from qflux.models import FluxTransformer2DModel

SGD = ["optimizer.class_path=torch.optim.SGD", "optimizer.init_args={lr: 0.1}"]


@pytest.mark.parametrize(
    "kind", ["lokr", pytest.param("dora", marks=pytest.mark.slow), pytest.param("loha", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("lora", "fp8"),
        pytest.param("lora", "int8", marks=pytest.mark.slow),
        pytest.param("dora", "fp8", marks=pytest.mark.slow),
        pytest.param("lokr", "int8", marks=pytest.mark.slow),
        pytest.param("loha", "fp8", marks=pytest.mark.slow),
    ],
)
def test_adapters_over_8_bit_products_train_resume_and_predict(config, kind, precision):
    shared = [f"lora.type={kind}", f"model.precision={precision}", "optimizer.init_args={lr: 0.02}"]
    whole = Trainer(config(*shared, "run_name=whole", "train.max_train_steps=4")).fit()
    Trainer(config(*shared, "run_name=part", "train.max_train_steps=2")).fit()
    sizes = ["predict.num_inference_steps=2", "predict.preprocessing=config"]
    settings = config(*shared, "run_name=part", "train.max_train_steps=4", *sizes)
    rest = Trainer(settings).fit()
    assert rest.adapter.read_bytes() == whole.adapter.read_bytes()
    fuller = config(*shared[::2], "run_name=fuller", "train.max_train_steps=4", *sizes)
    reference = [line["loss"] for line in lines(fuller)] if Trainer(fuller).fit() else []
    found = [line["loss"] for line in lines(settings)]
    assert found == pytest.approx(reference, rel=0.05)
    assert found != reference

    image = Image.effect_noise((96, 96), 80).convert("RGB")
    (ours,), (theirs,) = (Trainer(c).predict([[image]], ["x"], lora=rest.adapter) for c in (settings, fuller))
    difference = np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int))
    assert 0 < difference.mean() < 16


@pytest.mark.parametrize("others", ["train.method=full", "model.quantization=int8"], ids=lambda item: item)
def test_8_bit_products_are_refused_where_they_can_not_be(config, others):
    with pytest.raises(ConfigError, match=r"model\.precision"):
        config("model.precision=fp8", others)


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
    (base,), (tuned,) = (Trainer(c).predict([[image]], ["x"], size=(96, 96)) for c in (settings, replaced))
    assert np.abs(np.asarray(base, dtype=int) - np.asarray(tuned, dtype=int)).max() > 1


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_quantized_base_trains_a_lora_close_to_the_one_over_the_plain_base(config, kind):
    shared = [*SGD, "lora.init=kaiming", "train.max_train_steps=3"]
    plain = load_file(Trainer(config(*shared, "run_name=plain")).fit().adapter)
    quantized = load_file(Trainer(config(*shared, f"run_name={kind}", f"model.quantization={kind}")).fit().adapter)
    start = load_file(Trainer(config(*shared, "run_name=s", "optimizer.init_args={lr: 0.0}")).fit().adapter)
    flat = [torch.cat([t.flatten() for _, t in sorted(w.items())]) for w in (plain, quantized, start)]
    moved, apart = (flat[0] - flat[2]).norm(), (flat[0] - flat[1]).norm()
    assert 0 < apart < 0.3 * moved


@pytest.mark.parametrize(
    "every", ["2", pytest.param("true", marks=pytest.mark.slow), pytest.param("3", marks=pytest.mark.slow)]
)
def test_checkpointing_some_blocks_changes_nothing(config, every):
    first = Trainer(config(*SGD, "run_name=none")).fit().adapter
    second = Trainer(config(*SGD, "run_name=some", f"train.gradient_checkpointing={every}")).fit().adapter
    assert first.read_bytes() == second.read_bytes()


def test_checkpointing_every_second_block_recomputes_every_second_block(config, monkeypatch):
    from qflux.memory import recomputation

    calls = []
    original = recomputation.checkpoint
    monkeypatch.setattr(
        recomputation, "checkpoint", lambda block, *a, **k: calls.append(block) or original(block, *a, **k)
    )
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


def test_a_wrong_method_for_a_quantized_base_is_a_config_error(config):
    with pytest.raises(ConfigError, match=r"train\.method: full trains every weight"):
        config("model.quantization=nf4", "train.method=full")


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("torchao.optim.AdamW8bit", "{lr: 0.001, block_size: 64}"),
        pytest.param("torch.optim.Muon", "{lr: 0.01}", marks=pytest.mark.slow),
    ],
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
        ("train.gradient_checkpointing=1", "at least 2"),
    ],
)
def test_a_setting_without_effect_is_an_error(config, setting, message):
    with pytest.raises(ConfigError, match=message):
        config(setting)


def test_lora_plus_moves_up_projections_faster(config):
    """SGD without momentum: a step is the rate times the gradient, and the first gradient is the same."""
    one = [*SGD, "train.max_train_steps=1", "train.max_grad_norm=null"]
    plain, plus = (
        load_file(Trainer(config(*one, f"run_name=plus-{ratio}", f"lora.plus_ratio={ratio}")).fit().adapter)
        for ratio in (1.0, 16.0)
    )
    ups = [name for name in plain if ".lora_B." in name or name.endswith("lora_up.weight")]
    assert ups
    for name, tensor in plus.items():
        expected = 16 * plain[name] if name in ups else plain[name]  # ups begin at zero
        assert torch.allclose(tensor, expected, rtol=1e-5, atol=1e-9), name


def test_a_run_with_lora_plus_goes_on_to_the_same_bytes(config):
    settings = ["lora.plus_ratio=4.0", "optimizer.init_args={lr: 0.001}", "train.checkpoint_every=2"]
    whole = Trainer(config(*settings, "run_name=whole", "train.max_train_steps=4")).fit().adapter
    Trainer(config(*settings, "run_name=parts", "train.max_train_steps=2")).fit()
    parts = Trainer(config(*settings, "run_name=parts", "train.max_train_steps=4")).fit().adapter
    assert whole.read_bytes() == parts.read_bytes()


def test_lora_plus_is_refused_where_it_has_no_effect(config):
    with pytest.raises(ConfigError, match="plus_ratio is for lora and dora"):
        config("lora.plus_ratio=4.0", "lora.type=lokr")
    with pytest.raises(ConfigError, match="plus_ratio is for lora and dora"):
        config("lora.plus_ratio=4.0", "train.method=full")


def test_ranks_follow_patterns_and_reach_the_file(config, tmp_path):
    patterns = (
        r"lora.patterns=[{match: 'single_transformer_blocks\.\d+\.proj_out', rank: 8, alpha: 4.0}, "
        r"{match: 'attn\.to_v$', rank: 0}, {match: '^transformer_blocks\.0\.attn\.to_q$', rank: 2}]"
    )
    trainer = Trainer(config(patterns, "train.max_train_steps=2"))
    adapter = trainer.fit().adapter
    layers = read_adapter(adapter).layers(trainer.family, trainer.pretrained.transformer())
    plain = Trainer(config("run_name=plain", "train.max_train_steps=2"))
    expected = read_adapter(plain.fit().adapter).layers(plain.family, plain.pretrained.transformer())
    added = {name for name in layers if name.endswith("proj_out")}
    assert added
    assert layers.keys() == {name for name in expected if not name.endswith("to_v")} | added
    for name, layer in layers.items():
        wanted = (8, 4.0) if name in added else (2, 2.0) if name == "transformer_blocks.0.attn.to_q" else (4, 4.0)
        assert (layer.rank, layer.alpha) == wanted, name
    # The file says what it is, so that it can be used and gone on from.
    again = Trainer(config(patterns, "run_name=again", f"lora.init_from={adapter}", "train.max_train_steps=1"))
    assert again.fit().adapter.is_file()
    assert Trainer(config(patterns, "train.max_train_steps=4")).fit().resumed_from == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.patterns=[{match: '(', rank: 4}]"], "no regular expression"),
        (["lora.patterns=[{match: proj_out}]", "lora.type=loha"], "for lora and dora"),
        (["lora.patterns=[{match: proj_out}]", "train.method=full"], "for lora and dora"),
        (["lora.init_from=somewhere", "train.method=full"], "init_from has no effect"),
        (["lora.patterns=[{match: nothing_like_it, rank: 4}]"], "no layer of .* matches 'nothing_like_it'"),
        (["lora.patterns=[{match: '.', rank: 0}]"], "leave no layer to train"),
    ],
)
def test_patterns_that_say_nothing_are_refused(config, overrides, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(config(*overrides)).fit()
