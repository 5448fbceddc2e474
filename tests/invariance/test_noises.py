"""Several noises of a sample at one visit are as good as that many samples, whether or not they share its prefix."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from family_samples import REFERENCES, Models, lora_gradient
from helpers import picture
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.encoded import TextEmbedding
from qflux.data.noises import Noises
from qflux.demo.data import write_data_set
from qflux.errors import DataError
from qflux.models import FAMILIES, get_family
from qflux.models.family import ModelInputs
from qflux.models.loading import save_checkpoint
from qflux.ragged.shapes import Shapes
from qflux.sampling.predictor import Edit
from qflux.training.resume_guard import path_settings

SHARING = [name for name, reference in REFERENCES.items() if get_family(reference.family).facts.shares_prefix]
TOLERANCE = 1e-5


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("noises", [2, 4])
@pytest.mark.parametrize("name", SHARING)
def test_targets_behind_one_prefix_equal_separate_samples(name, noises, padded):
    """Outputs and LoRA gradients, against stock diffusers, for samples with 0 to 3 controls in one batch."""
    models = Models(name)
    cases = [[(3, 2)], [(2, 2), (2, 3)], [(1, 4), (2, 1), (1, 1), (3, 3)]]
    bases = [models.reference.fitted(sample) for sample in models.samples(cases, text=[5, 9, 3])]
    generator = torch.Generator().manual_seed(1)
    separate, images, shapes, sigma = [], [], [], []
    for base in bases:
        targets, controls = base.image.split([base.shapes.target_tokens, base.shapes.control_tokens])
        for _ in range(noises):
            noisy = torch.randn(targets.shape, generator=generator)
            level = torch.rand((), generator=generator)
            separate.append(type(base)(**{**vars(base), "image": torch.cat([noisy, controls]), "sigma": level}))
            images.append(noisy)
            sigma.append(level)
        images.append(controls)
        shapes.append(Shapes(base.shapes.targets * noises, base.shapes.controls))
    inputs = ModelInputs(
        images=torch.cat(images),
        shapes=shapes,
        text=[TextEmbedding(base.text, places=base.places) for base in bases],
        sigma=torch.stack(sigma),
        guidance=1.0,
        padded=padded,
    )
    rows = models.family.velocity(models.ours, inputs).split([sample.tokens for sample in shapes])
    together = [
        part
        for row, sample in zip(rows, shapes, strict=True)
        for part in row[: sample.target_tokens].split(sample.target_tokens // noises)
    ]
    for output, sample in zip(together, separate, strict=True):
        expected = models.alone(sample)[: len(output)]
        assert (output - expected).abs().max() <= TOLERANCE
        wanted = lora_gradient(models.stock, expected, sample.upstream)
        found = lora_gradient(models.ours, output, sample.upstream)
        assert wanted.abs().max() > 0.1
        assert (found - wanted).abs().max() <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def project(name: str, folder, data=None, **train):
    family = get_family(name)
    if not (folder / "data").exists():
        save_checkpoint(family.tiny(0), folder / "model", family.pipeline)
        write_data_set(folder / "data", 5, 0, edits=family.controls != (0, 0))
    settings = {
        "family": name,
        "output_dir": str(folder / "runs"),
        "run_name": f"run{len(list((folder / 'runs').glob('run*')))}",
        "model": {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {
            "path": str(folder / "data"),
            "processor": {"target_pixels": 128 * 128},
            **(data or {"batch_size": 2}),
        },
        "lora": {"rank": 4},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "train": {"max_train_steps": 2, **train},
        "predict": {"true_cfg_scale": 2.0},
    }
    trainer = Trainer(load_config(settings))
    trainer.cache()
    return trainer


def test_training_is_the_same_whether_the_prefix_is_shared_or_copied(tmp_path, monkeypatch):
    shared = project("qwen-image-2.1", tmp_path, noises_per_sample=3).fit()
    copied_each = classmethod(lambda cls, config: cls(config.train.noises_per_sample, shares_prefix=False))
    monkeypatch.setattr(Noises, "of", copied_each)
    copied = project("qwen-image-2.1", tmp_path, noises_per_sample=3).fit()
    ours, theirs = load_file(shared.adapter), load_file(copied.adapter)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) <= 1e-6
    assert shared.coverage.noises == 3 * shared.coverage.visits == 12
    first, second = (read_metrics(result) for result in (shared, copied))
    assert [line["noises"] for line in first] == [line["noises"] for line in second] == [6, 6]
    assert first[0]["loss"] == pytest.approx(second[0]["loss"], rel=1e-5)
    assert sum(line["tokens"] for line in first) < sum(line["tokens"] for line in second)


def read_metrics(result) -> list[dict]:
    file = result.adapter.parent.parent / "metrics.jsonl"
    return [line for line in map(json.loads, file.read_text().splitlines()) if "noises" in line]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plan_counts_the_tokens_of_all_noises(name, tmp_path):
    trainer = project(name, tmp_path, noises_per_sample=3)
    samples, noises = trainer.samples().training, Noises.of(trainer.config)
    for sample in samples:
        targets, rest = sample.shapes.target_tokens, sample.tokens - sample.shapes.target_tokens
        shared = get_family(name).facts.shares_prefix
        assert noises.tokens(sample) == (rest + 3 * targets if shared else 3 * (rest + targets))


def test_too_many_noises_for_the_budget_are_named(tmp_path):
    trainer = project("qwen-image-2.1", tmp_path, data={"max_tokens": 400}, noises_per_sample=8)
    with pytest.raises(DataError, match=r"with 8 noises each, are larger than data\.max_tokens 400"):
        trainer.fit()


def test_noises_are_those_of_as_many_visits():
    assert list(Noises(1).numbers(3)) == [3]
    assert list(Noises(4).numbers(0)) == [0, 1, 2, 3]
    assert [number for visit in range(3) for number in Noises(4).numbers(visit)] == list(range(12))


def test_sampling_runs_the_prefix_once_and_gives_what_running_it_in_every_step_gives(tmp_path, monkeypatch):
    predictor = project("qwen-image-2.1", tmp_path).predictor()
    edits = [
        Edit(tuple(picture(64, 96, i) for i in range(count)), "x", negative_prompt="bad", seed=count, size=(64, 96))
        for count in (0, 1, 3)
    ]
    sizes = []
    transformer = predictor._transformer
    transformer.transformer_blocks[0].register_forward_pre_hook(lambda block, args: sizes.append(len(args[0])))
    kept = [tokens for tokens, _ in predictor.latents(edits, steps=3)]
    assert sizes[0] > sizes[1] == sizes[2] == 2 * sum(len(tokens) for tokens in kept), "guided ones run twice"
    monkeypatch.setattr(predictor._sampler, "_keep_prefix", False)
    sizes.clear()
    again = [tokens for tokens, _ in predictor.latents(edits, steps=3)]
    assert len(set(sizes)) == 1
    for first, second in zip(kept, again, strict=True):
        assert (first - second).abs().max() <= TOLERANCE


def test_a_run_begun_before_there_were_several_noises_may_go_on_and_with_several_only_as_it_was_begun(config):
    """Its checkpoints do not know the setting, which is compared where it is set."""
    assert "train.noises_per_sample" not in path_settings(config(), 10)
    assert path_settings(config("train.noises_per_sample=3"), 10)["train.noises_per_sample"] == 3
