from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, QwenImagePipeline
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

from qflux.config import LossSettings, TimestepSettings
from qflux.data.batch import Batch, Draw, NoisySample
from qflux.data.encoded import EncodedSample, TextEmbedding
from qflux.data.sample import Sample
from qflux.errors import ConfigError
from qflux.losses import AttentionMaskMseLoss, MaskEditLoss, MseLoss, Objective
from qflux.losses.objective import StepSize, sample_weight
from qflux.losses.timesteps import NoiseLevels, NoiseShift, level_weight
from qflux.ragged.shapes import Shapes


def test_the_mean_is_over_valid_tokens():
    prediction = torch.randn(2, 10, 4)
    prediction[0, 8:] = float("nan")
    prediction.requires_grad_()
    target = torch.randn(2, 10, 4)
    valid = torch.ones(2, 10)
    valid[0, 8:] = 0
    valid[1, 6:] = 0
    loss = MseLoss()(prediction, target, attention_mask=valid)
    by_hand = (prediction[0, :8] - target[0, :8]).square().sum() + (prediction[1, :6] - target[1, :6]).square().sum()
    assert torch.allclose(loss, by_hand / (14 * 4))


def test_padding_gets_exactly_zero_gradient_whatever_it_holds():
    prediction = torch.randn(2, 5, 4)
    prediction[0, 3:] = float("nan")
    prediction.requires_grad_()
    valid = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    MaskEditLoss()(prediction, torch.randn(2, 5, 4), attention_mask=valid, edit_mask=torch.rand(2, 5)).backward()
    assert (prediction.grad[0, 3:] == 0).all()
    assert (prediction.grad[valid.bool()] != 0).all()


def test_mask_weights_and_reductions_by_hand():
    prediction, target = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    mask = torch.tensor([[1.0, 0.0, 0.25], [0.0, 0.0, 1.0]])
    weighting = torch.tensor([1.0, 3.0])
    weights = (mask * 2.5 + (1 - mask) * 0.5)[..., None] * weighting[:, None, None]
    expected = (prediction - target).square() * weights
    loss = MaskEditLoss(2.5, 0.5)
    arguments = {"edit_mask": mask, "weighting": weighting}
    assert torch.allclose(loss(prediction, target, **arguments, reduction="none"), expected)
    assert torch.allclose(loss(prediction, target, **arguments, reduction="sum"), expected.sum())
    assert torch.allclose(loss(prediction, target, **arguments), expected.mean())


def test_both_masks_at_once():
    prediction, target = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    edit, valid = torch.rand(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss = AttentionMaskMseLoss(2.0, 1.0)(prediction, target, attention_mask=valid, edit_mask=edit)
    expected = (prediction - target).square() * (1 + edit)[..., None] * valid[..., None]
    assert torch.allclose(loss, expected.sum() / (5 * 4))


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="differ in shape"):
        MseLoss()(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))


def batch_of(sizes: list[int], masks: list[torch.Tensor | None]) -> Batch:
    torch.manual_seed(0)
    encoded = [
        EncodedSample(
            f"s{i}",
            TextEmbedding(torch.zeros(2, 3)),
            torch.randn(n, 4),
            Shapes(((1, 1, n),), ((1, 1, 2),)),
            (torch.randn(2, 4),),
            m,
        )
        for i, (n, m) in enumerate(zip(sizes, masks, strict=True))
    ]
    items = [
        NoisySample(Sample(item.id, item.id, "", item.shapes), item, (Draw(0.3, torch.randn(n, 4)),))
        for n, item in zip(sizes, encoded, strict=True)
    ]
    return Batch.collate(items, "cpu", torch.float32)


def test_the_noisy_target_lies_between_image_and_noise_and_controls_stay_clean():
    batch = batch_of([3, 2], [None, None])
    images = batch.noisy_images()
    assert torch.allclose(images[:3], 0.7 * batch.targets[:3] + 0.3 * batch.noise[:3])
    assert torch.equal(images[3:5], batch.controls[:2])
    assert torch.allclose(images[5:7], 0.7 * batch.targets[3:] + 0.3 * batch.noise[3:])
    assert torch.equal(batch.velocity(), batch.noise - batch.targets)


@pytest.mark.parametrize("by_token", [True, False])
def test_the_shares_of_micro_batches_add_up_to_the_loss_of_the_step(by_token):
    sizes, masks = [5, 2, 9], [None, torch.tensor([1.0, 0.0]), None]
    settings = LossSettings(use_mask_loss=True, normalize_by_valid_tokens=by_token)
    whole = batch_of(sizes, masks)
    weights = [sample_weight(settings, StepSize(tokens=16, samples=3), size, 0.3) for size in sizes]
    whole = replace(whole, weight=torch.tensor(weights))
    prediction = torch.randn_like(whole.targets)
    total, _ = Objective(settings)(prediction, whole)

    error = (prediction - whole.velocity()).square().mean(-1)
    weight = torch.cat([torch.full((5,), 2.0), torch.tensor([2.0, 1.0]), torch.full((9,), 2.0)])
    per_sample = [part.sum() for part in (error * weight).split(sizes)]
    by_hand = sum(per_sample) / 16 if by_token else sum(s / n for s, n in zip(per_sample, sizes, strict=True)) / 3
    assert torch.allclose(total, by_hand)


def test_class_images_count_by_their_weight():
    batch = batch_of([4, 2], [None, None])
    settings, size = LossSettings(prior_weight=0.25), StepSize(tokens=6, samples=2)
    weights = [sample_weight(settings, size, 4, 0.3), sample_weight(settings, size, 2, 0.3, is_prior=True)]
    batch = replace(batch, weight=torch.tensor(weights))
    prediction = torch.randn_like(batch.targets)
    error = (prediction - batch.velocity()).square().mean(-1)
    total, _ = Objective(settings)(prediction, batch)
    assert torch.allclose(total, (error[:4].sum() + 0.25 * error[4:].sum()) / 6)


@pytest.mark.parametrize("by_token", [True, False])
def test_with_equal_sizes_the_loss_is_the_plain_mean(by_token):
    settings = LossSettings(normalize_by_valid_tokens=by_token)
    batch = batch_of([6, 6, 6], [None] * 3)
    weight = sample_weight(settings, StepSize(tokens=18, samples=3), 6, 0.3)
    batch = replace(batch, weight=torch.full((3,), weight))
    prediction = torch.randn_like(batch.targets)
    total, _ = Objective(settings)(prediction, batch)
    assert torch.allclose(total, torch.nn.functional.mse_loss(prediction, batch.noise - batch.targets))


def test_changing_the_size_of_one_sample_leaves_the_terms_of_the_others_unchanged():
    objective = Objective(LossSettings())
    terms = []
    for middle in (3, 11):
        torch.manual_seed(middle)
        batch = batch_of([5, middle, 7], [None] * 3)
        first, last = torch.randn(5, 4, generator=torch.manual_seed(1)), torch.randn(7, 4)
        targets = torch.cat([first, torch.randn(middle, 4), last])
        batch = replace(batch, targets=targets, noise=torch.zeros_like(targets))
        terms.append(objective(torch.zeros_like(targets), batch)[1])
    assert torch.equal(terms[0][[0, 2]], terms[1][[0, 2]])
    assert terms[0][1] != terms[1][1]


def test_control_tokens_get_exactly_zero_gradient_from_the_loss():
    """The model's output has a row for every image token; those of controls mean nothing and must teach nothing."""
    batch = batch_of([6, 3], [None, None])
    output = torch.randn(len(batch.targets) + len(batch.controls), 4, requires_grad=True)
    prediction, _ = batch.images.split(output)
    Objective(LossSettings())(prediction, batch)[0].backward()
    is_target = torch.tensor([True] * 6 + [False] * 2 + [True] * 3 + [False] * 2)
    assert (output.grad[~is_target] == 0).all()
    assert (output.grad[is_target] != 0).all()


@pytest.mark.parametrize("weighting", ["none", "cosmap", "sigma_sqrt"])
def test_weights_of_noise_levels_are_those_of_sd3(weighting):
    sigmas = torch.linspace(0.01, 0.99, 40, dtype=torch.float64)
    expected = compute_loss_weighting_for_sd3(weighting, sigmas)
    settings = LossSettings(weighting=weighting)
    assert torch.allclose(torch.tensor([level_weight(float(s), settings) for s in sigmas]), expected.float())


@pytest.mark.parametrize("density", ["cosmap", "sigma_sqrt"])
def test_a_density_that_is_a_weighting_brings_its_weighting_along(density):
    settings = LossSettings(timesteps=TimestepSettings(density=density))
    assert level_weight(0.3, settings) == level_weight(0.3, LossSettings(weighting=density)) != 1.0
    assert level_weight(0.3, LossSettings(timesteps=settings.timesteps, weighting="none")) == 1.0


def test_the_weight_of_no_noise_at_all_is_finite():
    assert level_weight(0.0, LossSettings(weighting="sigma_sqrt")) == pytest.approx(1e6)


@pytest.mark.parametrize(
    "settings",
    [
        {"density": "mode", "mode_scale": 1.29},
        {"density": "mode", "mode_scale": -0.5},
        {"density": "logit_normal", "mean": -0.3, "std": 1.4},
        {"density": "cosmap"},
        {"density": "sigma_sqrt"},
        {"density": "uniform"},
    ],
    ids=str,
)
def test_densities_are_diffusers(settings):
    mine = [NoiseLevels(TimestepSettings(**settings, shift="none")).draw(0, str(i), 0, 1, 1)[0] for i in range(4000)]
    theirs = compute_density_for_timestep_sampling(
        settings["density"],
        4000,
        logit_mean=settings.get("mean"),
        logit_std=settings.get("std"),
        mode_scale=settings.get("mode_scale"),
        generator=torch.Generator().manual_seed(0),
    )
    marks = torch.linspace(0.05, 0.95, 19)
    assert torch.allclose(torch.tensor(mine).quantile(marks), theirs.quantile(marks), atol=0.03)


def test_fixed_levels_are_stratified_and_their_noise_never_changes():
    levels = NoiseLevels(TimestepSettings(shift="none"))
    drawn = [levels.fixed_draw(0, "a", level, 4, 10, 4) for level in range(4)]
    assert [sigma for sigma, _ in drawn] == [0.125, 0.375, 0.625, 0.875]
    assert torch.equal(drawn[1][1], levels.fixed_draw(0, "a", 1, 4, 10, 4)[1])
    assert not torch.equal(drawn[1][1], drawn[2][1])


def test_noise_depends_on_seed_sample_and_visit_alone():
    levels = NoiseLevels(TimestepSettings())
    sigma, noise = levels.draw(1, "a", 0, 10, 4)
    again, same = levels.draw(1, "a", 0, 10, 4)
    assert sigma == again
    assert torch.equal(noise, same)
    for other in ((2, "a", 0), (1, "b", 0), (1, "a", 1)):
        assert levels.draw(*other, 10, 4)[0] != sigma


SCHEDULERS = {
    "FLUX.1 Kontext": (FluxKontextPipeline, {"shift": 3.0, "use_dynamic_shifting": True}),
    "Qwen-Image": (
        QwenImagePipeline,
        {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192, "shift": 1.0, "use_dynamic_shifting": True},
    ),
    "linear": (QwenImagePipeline, {"use_dynamic_shifting": True, "time_shift_type": "linear"}),
    "constant": (QwenImagePipeline, {"shift": 2.5}),
}
"""As the checkpoints of these models say it, and two kinds that others have."""


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096, 6000])
def test_training_shifts_noise_as_the_reference_pipelines_schedule_does(name, tokens):
    pipeline, settings = SCHEDULERS[name]
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    shift_of = vars(importlib.import_module(pipeline.__module__))["calculate_shift"]
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    sigmas = torch.linspace(0.95, 0.05, 10).tolist()
    mu = shift_of(tokens, *(scheduler.config[name] for name in names))
    scheduler.set_timesteps(sigmas=sigmas, mu=mu if scheduler.config.use_dynamic_shifting else None)
    levels = NoiseLevels(TimestepSettings(shift="resolution"), NoiseShift.of(scheduler))
    shifted = [levels.shifted(sigma, tokens) for sigma in sigmas]
    assert shifted == pytest.approx(scheduler.sigmas[:-1].tolist(), abs=1e-6)


def test_without_numbers_of_its_own_a_schedule_is_flux():
    assert NoiseShift.of(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)) == NoiseShift()


def test_densities_have_their_distributions():
    uniform = [
        NoiseLevels(TimestepSettings(density="uniform", shift="none")).draw(0, str(i), 0, 1, 1)[0] for i in range(2000)
    ]
    normal = [
        NoiseLevels(TimestepSettings(density="logit_normal", mean=0.5, std=0.8, shift="none")).draw(0, str(i), 0, 1, 1)[
            0
        ]
        for i in range(2000)
    ]
    logits = torch.tensor(normal).logit()
    assert torch.tensor(uniform).mean() == pytest.approx(0.5, abs=0.03)
    assert torch.tensor(uniform).std() == pytest.approx(12**-0.5, abs=0.02)
    assert logits.mean() == pytest.approx(0.5, abs=0.06)
    assert logits.std() == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize(
    "loss", [MseLoss(), MaskEditLoss(), AttentionMaskMseLoss()], ids=lambda loss: type(loss).__name__
)
def test_an_unknown_reduction_is_named(loss):
    with pytest.raises(ValueError, match="reduction is 'avg'; it is one of none, mean, sum"):
        loss(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), reduction="avg")


@pytest.mark.parametrize(
    "loss", [MseLoss(), MaskEditLoss(), AttentionMaskMseLoss(3.0, 0.5)], ids=lambda loss: type(loss).__name__
)
@pytest.mark.parametrize("shape", [(1, 6), (6,)])
def test_a_mask_for_all_samples_counts_for_each(loss, shape):
    prediction, target = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
    valid, edited = (torch.rand(6) > 0.4).float(), torch.rand(6)
    expected = loss(prediction, target, valid.expand(4, 6), edited.expand(4, 6))
    assert torch.allclose(loss(prediction, target, valid.reshape(shape), edited.reshape(shape)), expected)
    by_hand = (prediction - target).square() * torch.as_tensor(loss.token_weight(edited)) * valid[:, None]
    assert torch.allclose(expected, by_hand.sum() / (4 * valid.sum() * 5))


def test_a_mask_of_another_length_is_named():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 5\); expected \(4, 6\)"):
        MseLoss()(torch.zeros(4, 6, 5), torch.zeros(4, 6, 5), attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"edit_mask has shape \(4, 7\)"):
        MaskEditLoss()(torch.zeros(4, 6, 5), torch.zeros(4, 6, 5), edit_mask=torch.ones(4, 7))


def test_the_documents_call_is_understood_and_deprecated():
    prediction, target, mask = torch.randn(2, 6, 5), torch.randn(2, 6, 5), torch.rand(2, 6)
    weighting = torch.rand(2)
    loss = MaskEditLoss(2.0, 1.0)
    with pytest.warns(FutureWarning, match="edit_mask"):
        found = loss(mask=mask, model_pred=prediction, target=target, weighting=weighting, reduction="none")
    assert torch.equal(found, loss(prediction, target, edit_mask=mask, weighting=weighting, reduction="none"))
    with pytest.raises(ValueError, match="given twice"):
        loss(prediction, target, edit_mask=mask, mask=mask)


class Huber:
    """A loss of somebody's own: what `loss.class_path` takes."""

    def __init__(self, delta: float = 0.5) -> None:
        self.delta = delta

    def __call__(self, prediction, target, edit_mask=None, reduction="none"):
        return torch.nn.functional.huber_loss(prediction.float(), target, reduction=reduction, delta=self.delta)


class Total:
    """A loss that forgets what it is asked for."""

    def __call__(self, prediction, target, edit_mask=None, reduction="none"):
        return (prediction - target).square().mean()


def test_a_loss_of_ones_own_is_weighted_as_the_others_are():
    batch = batch_of([5, 2, 9], [None, None, None])
    settings = LossSettings(class_path=f"{__name__}.Huber", init_args={"delta": 0.1})
    prediction = torch.randn(16, 4)
    loss, terms = Objective(settings)(prediction, batch)
    errors = torch.nn.functional.huber_loss(prediction, batch.velocity(), reduction="none", delta=0.1).mean(-1)
    assert torch.allclose(terms, torch.stack([part.mean() for part in errors.split([5, 2, 9])]))
    assert torch.allclose(loss, (terms * batch.weight).sum())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class_path": "nowhere.Loss"}, "can't be imported"),
        ({"class_path": "math.pi"}, "is no class"),
        ({"class_path": f"{__name__}.Huber", "init_args": {"gamma": 1}}, "Huber takes delta"),
        ({"class_path": f"{__name__}.Total"}, "returns .* for 2 tokens"),
    ],
)
def test_a_loss_that_can_not_be_used_is_a_config_error(settings, message):
    with pytest.raises(ConfigError, match=rf"loss\.(.|\n)*{message}"):
        Objective(LossSettings(**settings))(torch.zeros(2, 4), batch_of([2], [None]))


def test_both_spellings_of_the_mask_loss_mean_the_same():
    assert LossSettings(kind="mask") == LossSettings(use_mask_loss=True)
    assert not LossSettings(kind="mse").use_mask_loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "mse", "use_mask_loss": True}, "contradict each other"),
        ({"kind": "mask", "use_mask_loss": False}, "contradict each other"),
        ({"kind": "mask", "class_path": "a.B"}, "set one of them"),
        ({"init_args": {"a": 1}}, "init_args are for class_path"),
    ],
)
def test_settings_of_the_loss_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LossSettings(**settings)
