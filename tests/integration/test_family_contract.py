"""What every family keeps, proven against its pipeline: the same image, a LoRA with every key, any batch of edits.

A family inherits these tests by its `Reference` in `family_samples`.
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest
import torch
from peft.utils import get_peft_model_state_dict

from family_samples import KINDS, REFERENCES, Reference
from helpers import picture
from qflux.adapters.attach import Weighted
from qflux.adapters.files import read_adapter
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.encoded import COMPLETE
from qflux.demo.data import write_data_set
from qflux.errors import DataError
from qflux.memory import placing
from qflux.memory.placing import Divided, place
from qflux.models import get_family, pretrained
from qflux.models.loading import save_checkpoint
from qflux.sampling.predictor import Edit
from qflux.training.distributed import World
from qflux.training.fit import chart

WIDTH, HEIGHT, STEPS, CFG = 128, 96, 3, 4.0


class Project:
    """A family's tiny checkpoint, a config on it, and a LoRA trained hard enough to be seen."""

    def __init__(self, reference: Reference, folder) -> None:
        self.reference = reference
        self.family = get_family(reference.family)
        self.parts = reference.components(0)
        save_checkpoint(self.parts, folder / "model", reference.pipeline_name)
        write_data_set(folder / "data", 6, 0, edits=self.family.controls != (0, 0))
        settings = {
            "family": self.family.name,
            "output_dir": str(folder / "runs"),
            "model": {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu"},
            "data": {
                "path": str(folder / "data"),
                "batch_size": 3,
                "processor": {"target_size": [HEIGHT, WIDTH], "controls_size": [[HEIGHT, WIDTH], [WIDTH, HEIGHT]]},
            },
            "lora": {"rank": 4, "alpha": 6},
            "optimizer": {"init_args": {"lr": 0.03}},
            "train": {"max_train_steps": 6},
            "predict": {"num_inference_steps": STEPS, "preprocessing": "config", "true_cfg_scale": CFG},
        }
        self.trainer = Trainer(load_config(settings))
        self.trainer.cache()
        self.adapter = self.trainer.fit().adapter

    def pipeline(self, with_lora: bool = False):
        """diffusers' own pipeline with diffusers' own transformer."""
        components = {name: part for name, part in vars(self.parts).items() if part is not None}
        stock = self.reference.stock.from_config(self.parts.transformer.config)
        stock.load_state_dict(self.parts.transformer.state_dict())
        pipe = self.reference.make(self.reference.pipeline_name, {**components, "transformer": stock})
        pipe.set_progress_bar_config(disable=True)
        if with_lora:
            pipe.load_lora_weights(self.adapter.parent)
        return pipe

    def pixels(self, edit: Edit, with_lora: bool) -> np.ndarray:
        """qflux's image in floating point: 8 bits would hide errors below 1/255."""
        predictor = self.trainer.predictor([Weighted(self.adapter)] if with_lora else ())
        ((tokens, shape),) = predictor.latents([edit])
        return (predictor._encoder.decode_image(tokens, shape) / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()


@pytest.fixture(scope="module", params=KINDS)
def project(request, tmp_path_factory) -> Project:
    return Project(REFERENCES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("with_lora", [False, True], ids=["base", "LoRA"])
@pytest.mark.parametrize("negative", [None, "blurry"], ids=["no CFG", "true CFG"])
def test_a_prediction_equals_the_reference_pipelines(project, negative, with_lora):
    controls = [picture(WIDTH, HEIGHT, 1), picture(HEIGHT, WIDTH, 2)][: project.reference.most_controls]
    expected = project.reference.draw(
        project.pipeline(with_lora),
        controls,
        prompt="make it red",
        negative_prompt=negative,
        true_cfg_scale=CFG,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
    )
    edit = Edit(tuple(controls), "make it red", negative_prompt=negative, seed=11, size=(HEIGHT, WIDTH))
    output = project.pixels(edit, with_lora)
    assert output.shape == expected.shape
    assert np.abs(output - expected).max() <= 1e-4
    if with_lora:
        assert np.abs(output - project.pixels(edit, with_lora=False)).max() > 1e-3


@pytest.mark.parametrize("with_lora", [False, True], ids=["base", "LoRA"])
def test_models_that_wait_in_host_memory_give_the_same_to_the_bit(project, with_lora, monkeypatch):
    """Text encoders and transformer with as little on the device as can be: two blocks at a time."""
    controls = tuple(picture(WIDTH, HEIGHT, seed) for seed in (1, 2))[: project.reference.most_controls]
    edits = [Edit(controls, "make it red", seed=seed, size=(HEIGHT, WIDTH)) for seed in (3, 4)]
    adapters = [Weighted(project.adapter)] if with_lora else ()

    def made():
        predictor = project.trainer.predictor(adapters)
        return predictor.prepare(edits[0]).text.tokens, [tokens for tokens, _ in predictor.latents(edits)]

    whole, streamed = made(), []

    def tightly(models, device, room, workspace=0):
        divided = [Divided.of(model) for model in models]
        streamed.extend(sum(each.all) for each in divided)
        place(models, device, sum(each.bytes(each.all) for each in divided))

    monkeypatch.setattr(placing, "_FEWEST", 2)
    monkeypatch.setattr(pretrained, "place", tightly)
    text, images = made()
    assert min(streamed) >= 2, "nothing was streamed"
    assert torch.equal(text, whole[0])
    assert all(torch.equal(*pair) for pair in zip(images, whole[1], strict=True))


def test_room_is_left_for_an_image_of_a_megapixel(project):
    """What its decoding takes is counted on no memory, with the checkpoint's own VAE."""
    config = load_config(project.trainer.config.dump(), ["memory=3GB"])
    limited = Trainer(config).pretrained
    components = limited.loaded(project.family.image_parts)
    workspace = limited._workspace(components)
    pixels = 3 * 1024**2 * 4
    assert pixels < workspace < 3e9
    limited.place(components)
    shape = (1, HEIGHT // project.family.pixels_per_token, WIDTH // project.family.pixels_per_token)
    tokens = torch.randn(shape[1] * shape[2], project.family.facts.image_channels)
    assert limited.encoder("image").decode_image(tokens, shape).shape[1:] == (HEIGHT, WIDTH)


LARGE = [pytest.param((1024, width), marks=pytest.mark.slow) for width in (1024, 1280)]


class _ScheduledError(Exception):
    """Ends a pipeline where it has its schedule."""


@pytest.mark.parametrize("size", [(256, 256), (512, 384), (768, 512), *LARGE], ids=str)
def test_training_takes_its_noise_levels_from_the_pipelines_schedule(project, size):
    height, width = size
    pipe = project.pipeline()
    # Qwen's schedule is also stretched a little, to end at 0.02 where the last step begins. What lies below that is
    # used by no step; training draws from all levels.
    pipe.register_modules(scheduler=type(pipe.scheduler).from_config(pipe.scheduler.config, shift_terminal=None))
    set_timesteps = pipe.scheduler.set_timesteps

    @functools.wraps(set_timesteps)  # pipelines look at its signature
    def set_and_stop(*args, **options):
        set_timesteps(*args, **options)
        raise _ScheduledError

    pipe.scheduler.set_timesteps = set_and_stop
    steps = project.trainer.pretrained.facts.num_inference_steps
    controls = [picture(64, 64, 1)][: project.reference.most_controls]
    options = {"prompt": "red", "negative_prompt": None, "true_cfg_scale": CFG, "num_inference_steps": steps}
    with pytest.raises(_ScheduledError):
        project.reference.draw(pipe, controls, height=height, width=width, **options)

    course = chart(project.trainer.config, project.trainer.pretrained, project.trainer.samples(), World(), False)
    drawn = [course.levels.shifted(1 - step / steps, height * width // 256) for step in range(steps)]
    np.testing.assert_allclose(drawn, pipe.scheduler.sigmas[:-1].numpy(), rtol=1e-5)


def test_a_mixed_batch_of_edits_equals_one_by_one(project):
    predictor = project.trainer.predictor([Weighted(project.adapter)])
    sizes = [(96, 64), (64, 64), (32, 128), (96, 96), (64, 96), (128, 32)]
    edits = [
        Edit(
            tuple(picture(60 + 10 * i, 90, i) for i in range(count)),
            f"edit number {row}",
            negative_prompt="bad" if row % 2 else None,
            seed=row,
            size=sizes[row],
        )
        for row, count in enumerate(project.reference.control_counts)
    ]
    alone = [predictor.latents([edit])[0] for edit in edits]
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1]):
        together = predictor.latents([edits[row] for row in order])
        for row, (tokens, shape) in zip(order, together, strict=True):
            expected, expected_shape = alone[row]
            assert shape == expected_shape
            assert (tokens - expected).abs().max() <= 1e-5


def test_the_lora_loads_with_no_unexpected_or_missing_key(project, caplog):
    pipe = project.pipeline()
    logging.getLogger("diffusers").propagate = True
    with caplog.at_level(logging.WARNING):
        pipe.load_lora_weights(project.adapter.parent)
    assert not [record.message for record in caplog.records if "led to" in record.message]
    (name,) = pipe.get_active_adapters()
    loaded = get_peft_model_state_dict(pipe.transformer, adapter_name=name)
    layers = read_adapter(project.adapter).layers(project.family, project.reference.components(0).transformer)
    assert {key.rpartition(".lora_")[0] for key in loaded} == set(layers)
    for layer, trained in layers.items():  # some pipelines multiply the strength into the matrices
        assert trained.scale == (6 / 4 if project.family.lora_alphas else 1)
        scale = pipe.transformer.get_submodule(layer).scaling[name]
        effect = scale * loaded[f"{layer}.lora_B.weight"] @ loaded[f"{layer}.lora_A.weight"]
        assert torch.allclose(effect, trained.scale * trained.up @ trained.down, atol=1e-7)


def test_the_wrong_number_of_controls_is_named(project):
    least, most = project.family.controls
    wrong = least - 1 if least else (most or 0) + 1
    if most is None and not least:
        project.family.check_controls(99, "edit")  # any number is right
        return
    with pytest.raises(DataError, match=f"{wrong} control images; {project.family.name} takes"):
        project.trainer.predictor().latents([Edit((picture(64, 64, 0),) * wrong, "x")])


def test_tiny_components_are_a_function_of_their_seed(project):
    before = torch.random.get_rng_state()
    first, same, other = (project.reference.components(seed).transformer.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_facts_are_those_of_the_components(project):
    """What is known without torch, and what the real classes say."""
    facts, widths = project.family.facts, project.family.widths(project.parts.transformer)
    assert widths.image == facts.image_channels
    encoded = project.trainer.samples().training[0].embeddings.load(COMPLETE)
    assert encoded.target.shape == (encoded.shapes.target_tokens, widths.image)
    projects = project.trainer.config.projects_text
    assert encoded.text.tokens.shape[-1] == (widths.projected_text if projects else widths.text)
    assert (encoded.text.pooled is None) == (widths.pooled is None)
    names = [name for name, _ in project.parts.transformer.named_modules()]
    assert all(any(name.endswith(f".{target}") for name in names) for target in facts.lora_targets)
