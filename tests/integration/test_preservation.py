"""`loss.preserve`: what an edit is to leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from family_samples import REFERENCES, Models
from qflux.adapters.lora import without_adapter
from qflux.commands import Trainer
from qflux.config import LossSettings
from qflux.data.batch import Batch, Draw, NoisySample
from qflux.data.encoded import EncodedSample, TextEmbedding
from qflux.data.sample import Sample
from qflux.errors import ConfigError
from qflux.losses.objective import Objective
from qflux.ragged.shapes import Shapes
from qflux.training.batches import is_blank_visit


def encoded(size: int, mask: torch.Tensor | None, control: bool = True) -> EncodedSample:
    shape = (1, 1, size)
    return EncodedSample(
        id="",
        text=TextEmbedding(torch.randn(2, 8)),
        target=torch.randn(size, 4),
        shapes=Shapes((shape,), (shape,) if control else ()),
        controls=(torch.randn(size, 4),) if control else (),
        mask=mask,
    )


def batch_of(sizes: list[int], masks: list[torch.Tensor | None], blank: list[bool]) -> Batch:
    items = []
    for number, (size, mask, is_blank) in enumerate(zip(sizes, masks, blank, strict=True)):
        item = encoded(size, mask)
        draw = Draw(0.3, torch.randn(size, 4), weight=1 / (number + 2), is_blank=is_blank)
        items.append(NoisySample(Sample(str(number), str(number), "", item.shapes), item, (draw,)))
    return Batch.collate(items, "cpu", torch.float32)


def objective(**preserve: object) -> Objective:
    return Objective(LossSettings(preserve=preserve))


def test_tokens_outside_of_the_region_are_held_to_the_control():
    mask = torch.tensor([1.0, 0.25, 0.0])
    sample = encoded(3, mask)
    kept = sample.keeping_the_rest()
    (control,) = sample.controls
    assert torch.equal(kept.target[0], sample.target[0])
    assert torch.equal(kept.target[1], sample.target[1])  # the region touches it
    assert torch.equal(kept.target[2], control[2])
    for other in (encoded(3, None), encoded(3, mask, control=False)):  # edited everywhere; nothing to stay as
        assert other.keeping_the_rest() is other

    batch = batch_of([3, 2], [mask, None], [False, False])
    prediction = torch.randn_like(batch.targets)
    errors = (prediction - batch.velocity()).square().mean(-1)
    _, terms = objective(weight=3.0)(prediction, batch)
    assert torch.allclose(terms[0], (errors[0] + errors[1] + 3 * errors[2]) / 3)
    assert torch.allclose(terms[1], errors[3:].mean())


def test_tokens_outside_of_the_region_are_held_to_the_base():
    batch = batch_of([4], [torch.tensor([1.0, 0.0, 0.25, 1.0])], [False])
    prediction, base = torch.randn_like(batch.targets), torch.randn_like(batch.targets)
    judge = objective(weight=0.5, toward="base")
    assert judge.asks_base(batch)
    wanted, stays = ((prediction - goal).square().mean(-1) for goal in (batch.velocity(), base))
    _, terms = judge(prediction, batch, base)
    by_hand = wanted[0] + 0.5 * stays[1] + wanted[2] + wanted[3]
    assert torch.allclose(terms[0], by_hand / 4)


def test_a_visit_without_a_prompt_is_held_to_the_base_everywhere():
    batch = batch_of([2, 3], [torch.tensor([0.0, 1.0]), None], [True, False])
    prediction, base = torch.randn_like(batch.targets), torch.randn_like(batch.targets)
    judge = objective(weight=2.0, blank=0.5)
    _, terms = judge(prediction, batch, base)
    assert torch.allclose(terms[0], (prediction - base)[:2].square().mean())
    assert torch.allclose(terms[1], (prediction - batch.velocity())[2:].square().mean())
    others = replace(batch, blank=None)
    assert judge.asks_base(batch)
    assert not judge.asks_base(others)
    assert Objective(LossSettings(preserve={"blank": 0.5}), always_asks=True).asks_base(others)
    assert not Objective(LossSettings(), always_asks=True).asks_base(others)


@pytest.mark.parametrize("name", REFERENCES)
def test_without_its_adapter_a_model_is_what_it_was(name):
    models = Models(name)
    samples = models.samples([[(2, 3), (3, 3)], [(4, 2), (2, 2)]])
    with torch.no_grad():
        trained = torch.cat(models.packed(samples))
        with without_adapter(models.ours):
            found = torch.cat(models.packed(samples))
        again = torch.cat(models.packed(samples))
        models.ours.delete_adapters(["default"])
        expected = torch.cat(models.packed(samples))
    # FLUX.2's layer of two tensors is summed up in their order where it has a LoRA, even one that does not count.
    rounding = 1e-6 if name.startswith("flux2") else 0.0
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
    assert torch.equal(again, trained)
    assert not torch.allclose(found, trained, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", REFERENCES)
def test_an_adapter_that_has_learnt_nothing_changes_no_bit(name):
    models = Models(name)
    samples = models.samples([[(2, 3), (3, 3)], [(4, 2), (2, 2)]])
    with torch.no_grad():
        for parameter_name, parameter in models.ours.named_parameters():
            if "lora_B" in parameter_name:
                parameter.zero_()
        blank = torch.cat(models.packed(samples))
        with without_adapter(models.ours):
            assert torch.equal(torch.cat(models.packed(samples)), blank)


PRESERVED = {
    "control": ("loss.preserve.weight=2.0",),
    "base": ("loss.preserve={weight: 2.0, toward: base}",),
    "blank": ("loss.preserve.blank=0.5",),
}


def trained(config, name: str, *overrides: str) -> dict[str, torch.Tensor]:
    steps = ("cache.path=null", "data.batch_size=6", "train.preflight=false", "optimizer.class_path=torch.optim.SGD")
    trainer = Trainer(config(*steps, "optimizer.init_args={lr: 0.1}", f"run_name={name}", *overrides))
    trainer.cache()
    return load_file(trainer.fit().adapter)


@pytest.mark.parametrize("kind", PRESERVED)
def test_it_changes_what_is_learnt_the_same_in_any_cut_of_a_step(config, kind):
    plain = trained(config, "plain")
    whole = trained(config, "whole", *PRESERVED[kind])
    cut = trained(config, "cut", *PRESERVED[kind], "train.tokens_per_pass=300", "train.gradient_checkpointing=true")
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in whole.items())
    for name, tensor in whole.items():
        assert (tensor - cut[name]).abs().max() <= 1e-6, name


def test_a_weight_of_zero_is_none_to_the_last_byte(config):
    plain = Trainer(config("run_name=plain")).fit().adapter
    zero = Trainer(config("run_name=zero", "loss.preserve={weight: 0.0, toward: control, blank: 0.0}")).fit().adapter
    assert zero.read_bytes() == plain.read_bytes()


def test_visits_without_a_prompt_are_as_many_as_asked_for(config):
    settings = config("loss.preserve.blank=0.3")
    drawn = [is_blank_visit(settings, f"sample {n}", visit) for n in range(100) for visit in range(20)]
    assert 0.27 < sum(drawn) / len(drawn) < 0.33
    assert not any(is_blank_visit(config(), "a", visit) for visit in range(50))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.preserve.toward=base"], "toward has no effect without a weight"),
        (["loss.preserve.blank=0.1", "train.method=full"], "leaves no such model"),
        (["loss.preserve={weight: 1.0, toward: base}", "train.method=full"], "leaves no such model"),
    ],
)
def test_what_has_no_effect_is_refused(config, overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_without_masks_there_is_nothing_to_preserve(config, data_set, tmp_path):
    bare = tmp_path / "bare"
    for folder in ("control_images", "training_images"):
        (bare / folder).mkdir(parents=True)
        for file in (data_set / folder).iterdir():
            if "_mask" not in file.name:
                (bare / folder / file.name).write_bytes(file.read_bytes())
    trainer = Trainer(config("loss.preserve.weight=1.0", f"data.path={bare}", f"cache.path={tmp_path / 'cache'}"))
    trainer.cache()
    with pytest.raises(ConfigError, match="no sample has a mask"):
        trainer.fit()
