"""FLUX.3 and Qwen-Image-2.1: what stays diffusers' own, how images reach their size, and what is refused."""

from __future__ import annotations

import random
import shutil
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor

from family_samples import REFERENCES, Models
from helpers import picture
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.images.pixels import to_pixels
from qflux.models import get_family
from qflux.models.flux3.family import lone_view
from qflux.models.flux3.layout import Flux3Layout
from qflux.models.loading import save_checkpoint
from qflux.models.qwen_image21.arrangement import arrange, pairs_of, positions
from qflux.models.qwen_image21.layout import QwenImage21Layout
from qflux.ragged.shapes import Shapes
from qflux.ragged.spans import mask_of
from qflux.sampling.predictor import Edit
from qflux.sampling.prepare import Preparer

NAMES = ("flux3", "qwen-image-2.1")


@pytest.mark.parametrize("name", NAMES)
def test_a_call_without_a_layout_is_diffusers_own(name):
    models = Models(name)
    (sample,) = models.samples([[(3, 4), (2, 2)]])
    arguments = models.reference.alone(models.reference.fitted(sample))
    assert torch.equal(models.ours(**arguments).sample, models.stock(**arguments).sample)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_transformer_loads_as_diffusers_class(name, tmp_path):
    model = get_family(name).tiny(0).transformer
    model.save_pretrained(tmp_path)
    loaded = REFERENCES[name].stock.from_pretrained(tmp_path)
    assert type(loaded) is REFERENCES[name].stock
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_a_replaced_attention_is_refused_and_never_left_out(name):
    models = Models(name)
    first = models.family.blocks(models.ours)[0]

    class Doubled(type(first.attn.processor)):
        pass

    first.attn.set_processor(Doubled())
    with pytest.raises(ValueError, match="attention processor Doubled is not used"):
        models.packed(models.samples([[(3, 4)], [(2, 2)]]))


def test_a_distilled_model_is_told_where_a_step_leads_and_no_other_is():
    for name, given in (("flux3", torch.zeros(1)), ("flux3, distilled", None)):
        models = Models(name)
        (sample,) = models.samples([[(3, 4)]])
        arguments = models.reference.alone(models.reference.fitted(sample)) | {"target_timestep": given}
        packed = {key: value[0] for key, value in arguments.items() if key.endswith("hidden_states")}
        layout = Flux3Layout.build([7], [12], [0])
        with pytest.raises(ValueError, match="target_timestep is needed by, and only by, a distilled"):
            models.ours(**{**arguments, **packed}, layout=layout)


def test_what_can_not_run_ragged_is_refused():
    models = Models("qwen-image-2.1")
    layout = QwenImage21Layout.build([7], [Shapes(((1, 2, 2),))], [()])
    tokens = torch.zeros(4, 64), torch.zeros(7, 32), torch.zeros(1)
    with pytest.raises(ValueError, match="kv_cache is not supported"):
        models.ours(*tokens, layout=layout, kv_cache=QwenImage21KVCache(3), kv_cache_mode="extract")
    models.ours.register_to_config(causal_condition=False)
    with pytest.raises(ValueError, match="causal_condition is off"):
        models.ours(*tokens, layout=layout)


@pytest.mark.parametrize(
    ("text", "shapes", "places", "message"),
    [
        (5, Shapes(((1, 2, 2),), ((1, 2, 2),)), (), "can't stand at the places"),
        (5, Shapes(((1, 2, 2),), ((1, 2, 2),)), (6,), "can't stand at the places"),
        (5, Shapes(((1, 2, 2),), ((1, 2, 2), (1, 2, 2))), (4, 2), "can't stand at the places"),
    ],
)
def test_controls_stand_in_the_text_and_in_order(text, shapes, places, message):
    with pytest.raises(ValueError, match=message):
        arrange(text, shapes, places)


def test_more_than_the_table_of_positions_holds_is_named():
    with pytest.raises(ValueError, match="needs 8193 positions; there are 8192"):
        positions(8192, Shapes(((1, 2, 2),)), ())
    with pytest.raises(ValueError, match="larger than 2048 a side"):
        positions(5, Shapes(((1, 2, 2050),)), ())


@pytest.mark.parametrize("seed", range(6))
def test_pairs_are_those_of_the_mask(seed):
    """What the utilisation of a step is computed from."""
    rng = random.Random(seed)
    text, count = rng.randint(1, 20), rng.randint(0, 3)
    shapes = Shapes(
        ((1, rng.randint(1, 4), rng.randint(1, 4)),) * rng.randint(1, 3),
        tuple((1, rng.randint(1, 4), rng.randint(1, 4)) for _ in range(count)),
    )
    assert pairs_of(text, shapes) == int(mask_of(arrange(text, shapes, [0] * count).spans).sum())


@pytest.mark.parametrize("seed", range(20))
def test_a_single_reference_of_flux3_is_mirrored_as_its_pipeline_does(seed):
    rng = random.Random(seed)
    width, height = rng.choice([(rng.randint(3, 200), rng.randint(3, 200)), (rng.randint(900, 2300), 1111), (5000, 90)])
    image = picture(width, height, seed)
    expected, kwargs = Flux3ImageProcessor().preprocess(image, resize_mode="fill")
    transform = lone_view(width, height)
    ours = to_pixels(transform(image))
    assert ours.shape == expected[0].shape
    assert (ours - expected[0]).abs().max() <= 1e-5
    left, top, right, bottom = kwargs["reference_crop"]
    whole = (0, 0, ours.shape[2], ours.shape[1])
    assert (transform.kept or whole) == (left, top, right, bottom)
    assert np.prod(transform.size) <= 4 * 1024 * 1024


def test_diffusers_has_the_classes_that_these_families_extend():
    for name in NAMES:
        assert getattr(diffusers, get_family(name).facts.transformer) is REFERENCES[name].stock


def test_a_single_reference_of_any_size_gives_what_flux3s_pipeline_gives(tmp_path):
    """Mirrored up to whole tokens, and cut back; nobody asks for a size."""
    reference = REFERENCES["flux3"]
    parts = reference.components(0)
    save_checkpoint(parts, tmp_path / "model", reference.pipeline_name)
    shutil.rmtree(tmp_path / "model" / "scheduler")  # published checkpoints need not have one
    settings = {
        "family": "flux3",
        "output_dir": str(tmp_path),
        "model": {"pretrained": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(tmp_path)},
        "predict": {"num_inference_steps": 2, "preprocessing": "pipeline", "true_cfg_scale": 2.0},
    }
    predictor = Trainer(load_config(settings)).predictor()
    image = picture(75, 106, 3)
    (ours,) = predictor([Edit((image,), "make it red", seed=5)])
    stock = reference.stock.from_config(parts.transformer.config)
    stock.load_state_dict(parts.transformer.state_dict())
    pipe = reference.make(reference.pipeline_name, {**vars(parts), "transformer": stock})
    options = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(5), "true_cfg_scale": 2.0}
    expected = reference.draw(pipe, [image], prompt="make it red", output_type="pil", **options)
    assert ours.size == expected.size == image.size
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1


def test_the_result_of_qwen_image_21_is_sized_as_the_last_image_is(tmp_path):
    family = get_family("qwen-image-2.1")
    preparer = Preparer(family, None, None, torch.device("cpu"), torch.float32)
    size, transforms = preparer.transforms([(800, 800), (1600, 900)])
    assert [transform.size for transform in transforms] == [(1024, 1024), (768, 1376)]
    assert size == (768, 1376)
    assert preparer.transforms([])[0] == (1024, 1024)


def test_a_distilled_transformer_in_place_of_another_is_known_as_one(tmp_path):
    checkpoint, other = tmp_path / "base", tmp_path / "distilled"
    save_checkpoint(REFERENCES["flux3"].components(0), checkpoint, "Flux3ModularPipeline")
    REFERENCES["flux3, distilled"].components(0).transformer.save_pretrained(other)
    settings = {"family": "flux3", "model": {"pretrained": str(checkpoint), "device": "cpu"}, "data": {"path": "x"}}
    assert not Trainer(load_config(settings)).pretrained.facts.is_distilled
    settings["model"]["transformer"] = str(other)
    facts = Trainer(load_config(settings)).pretrained.facts
    assert (facts.is_distilled, facts.num_inference_steps, facts.true_cfg_scale) == (True, 16, 1.0)
    assert facts.caution


def test_what_is_left_of_four_bits_does_not_say_what_to_compute_in():
    model = get_family("flux3").tiny(0).transformer.bfloat16()
    quantized = SimpleNamespace(bnb_4bit_compute_dtype=torch.float16)
    model.hf_quantizer = SimpleNamespace(quantization_config=quantized)
    assert model.dtype == torch.float16


def test_a_padded_call_of_qwen21_that_does_not_fit_together_is_named():
    models = Models("qwen-image-2.1")
    batch = models.batch(models.samples([[(3, 4), (2, 2)], [(2, 2)]]), fill=0.0)
    arguments = models.arguments(batch)
    changes = {
        "needed": {"img_mask": None},
        "sample 0 has 0 places in img_mask before its target": {"img_mask": torch.zeros_like(batch.slots)},
        "img_shapes say": {"img_shapes": [[(1, 4, 4), (1, 6, 8)], [(1, 4, 6)]], "attention_mask": batch.mask},
        "2 samples, 1 img_shapes": {"img_shapes": arguments["img_shapes"][:1], "attention_mask": batch.mask},
    }
    for message, change in changes.items():
        with pytest.raises(ValueError, match=message):
            models.ours(**{**arguments, **change})


def test_a_padded_call_of_qwen21_needs_no_mask_of_its_own():
    """Shapes and places say which tokens are valid; text is masked as diffusers does."""
    models = Models("qwen-image-2.1")
    samples = models.samples([[(3, 4), (2, 2)], [(2, 2)], [(1, 5), (2, 1), (3, 3)]], text=[7, 3, 5])
    batch = models.batch(samples, fill=float("nan"))
    output = models.padded(batch, encoder_hidden_states_mask=batch.text_mask)
    for sample, own in zip(samples, batch.outputs(output), strict=True):
        assert (own - models.alone(sample)).abs().max() <= 1e-5


@pytest.mark.parametrize("cut", [[3], [2, 1], [1, 1, 1]])
def test_the_blocks_of_controls_have_a_gradient_however_a_step_without_controls_is_cut(cut):
    """None instead of zero would let an optimizer skip them: no decay, no momentum."""
    models = Models("flux3")
    samples = models.samples([[(3, 4)], [(2, 2)], [(2, 2)]])
    start = 0
    for count in cut:
        for output in models.packed(samples[start : start + count]):
            output.sum().backward(retain_graph=True)
        start += count
    for name, parameter in models.ours.named_parameters():
        if parameter.requires_grad and ".image_cond." in name:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
