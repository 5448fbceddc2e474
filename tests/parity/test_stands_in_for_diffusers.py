"""Whatever one does with diffusers' transformer class works with qflux's: caches, hooks, compilation, export, saving.

The calls are those of diffusers' own test suites for the two transformers and their pipelines.
"""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import diffusers
import pytest
import torch
from diffusers.hooks import (
    FirstBlockCacheConfig,
    LayerSkipConfig,
    MagCacheConfig,
    apply_layer_skip,
)
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from PIL import Image

from family_samples import REFERENCES, Models, PaddedBatch, samples_of, small_images
from qflux.models import FluxTransformer2DModel, get_family

BOTH = ["flux-kontext", "qwen-image-edit-plus", "flux2"]


@pytest.fixture(params=BOTH)
def models(request) -> Models:
    made = Models(request.param)
    made.ours.eval()
    made.stock.eval()
    return made


def uniform(models: Models, count: int = 1) -> dict[str, Any]:
    """An ordinary call: `count` samples of one shape."""
    samples = samples_of([[(3, 4), (2, 2)]] * count)
    arguments = models.arguments(PaddedBatch.of(samples, fill=0.0))
    if "img_ids" in arguments:
        arguments["img_ids"] = arguments["img_ids"][0]
    return arguments


CACHES = {
    "first block": lambda model: FirstBlockCacheConfig(threshold=1e6),
    "mag": lambda model: MagCacheConfig(
        threshold=1e6, num_inference_steps=4, retention_ratio=0.0, mag_ratios=torch.ones(4), max_skip_steps=4
    ),
}


FAILS_IN_DIFFUSERS = [("flux2", "first block")]
KEEPS_LAYERS = ["flux2"]
"""diffusers skips layers of the classes it knows, and FLUX.2's are not among them (0.42)."""


@pytest.mark.parametrize("cache", CACHES)
@torch.no_grad()
def test_caches_skip_what_they_skip_in_diffusers(models, cache):
    if (models.family.name, cache) in FAILS_IN_DIFFUSERS:
        pytest.skip("diffusers' own class fails too (0.42)")
    results = []
    for model in (models.ours, models.stock):
        model.enable_cache(CACHES[cache](model))
        with model.cache_context("test"):
            arguments = uniform(models)
            outputs = []
            for turn in range(3):
                arguments["hidden_states"] = arguments["hidden_states"] + 0.1 * turn
                outputs.append(model(**arguments, return_dict=False)[0])
        model.disable_cache()
        results.append(torch.stack(outputs))
        without = model(**arguments, return_dict=False)[0]
        assert not torch.allclose(without, outputs[-1], atol=1e-5), "nothing was skipped"
    assert torch.equal(*results)


@torch.no_grad()
def test_layers_are_skipped_as_in_diffusers(models):
    whole = models.ours(**uniform(models), return_dict=False)[0]
    outputs = []
    for model in (models.ours, models.stock):
        apply_layer_skip(model, LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=False))
        outputs.append(model(**uniform(models), return_dict=False)[0])
    assert torch.equal(*outputs)
    if models.family.name not in KEEPS_LAYERS:
        assert not torch.allclose(outputs[0], whole)


def test_whole_blocks_are_skipped_as_in_diffusers(models):
    """diffusers itself gives the streams of a two-stream block back in the wrong order (0.42): then both fail alike."""
    outcomes = []
    for model in (models.ours, models.stock):
        apply_layer_skip(model, LayerSkipConfig(indices=[0], fqn="transformer_blocks"))
        with torch.no_grad():
            try:
                outcomes.append(model(**uniform(models), return_dict=False)[0].tolist())
            except RuntimeError as error:
                outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
@torch.no_grad()
def test_an_ordinary_call_compiles_into_one_graph(models, count):
    torch.compiler.reset()
    arguments = uniform(models, count)
    compiled = torch.compile(models.ours, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            output = compiled(**arguments, return_dict=False)[0]
    assert torch.equal(output, models.ours(**arguments, return_dict=False)[0])


@torch.no_grad()
def test_a_text_mask_compiles_into_one_graph():
    models = Models("qwen-image-edit-plus")
    arguments = uniform(models, 2)
    arguments["encoder_hidden_states_mask"] = torch.ones(2, 7, dtype=torch.bool)
    arguments["encoder_hidden_states_mask"][1, 4:] = False
    torch.compiler.reset()
    output = torch.compile(models.ours, fullgraph=True, backend="eager")(**arguments, return_dict=False)[0]
    assert (output - models.ours(**arguments, return_dict=False)[0]).abs().max() <= 1e-5


@torch.no_grad()
def test_an_ordinary_call_can_be_exported(models):
    arguments = {**uniform(models), "return_dict": False}
    plain = models.reference.stock.from_config(models.ours.config)
    ours = type(models.ours).from_config(models.ours.config)
    ours.load_state_dict(plain.state_dict())
    exported = torch.export.export(ours.eval(), (), arguments)
    torch.testing.assert_close(exported.module()(**arguments)[0], plain.eval()(**arguments)[0], rtol=0, atol=1e-5)


def test_one_entry_of_image_ids_serves_all_samples():
    models = Models("flux-kontext")
    arguments = uniform(models, 3)
    expected = models.stock(**arguments, return_dict=False)[0]
    arguments["img_ids"] = arguments["img_ids"][None]
    assert torch.equal(models.ours(**arguments, return_dict=False)[0], expected)


class _Doubled(FluxAttnProcessor):
    """A processor of somebody's own."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        out = super().__call__(*args, **options)
        return tuple(2 * part for part in out) if isinstance(out, tuple) else 2 * out


class _DoubledQwen(QwenDoubleStreamAttnProcessor2_0):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return tuple(2 * part for part in super().__call__(*args, **options))


class _DoubledFlux2(Flux2AttnProcessor):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return tuple(2 * part for part in super().__call__(*args, **options))


DOUBLED = {"flux-kontext": _Doubled, "flux2": _DoubledFlux2}


@torch.no_grad()
def test_a_custom_attention_processor_is_used_or_refused_and_never_left_out(models):
    doubled = DOUBLED.get(models.family.name, _DoubledQwen)
    for model in (models.ours, models.stock):
        for block in model.transformer_blocks:
            block.attn.set_processor(doubled())
    arguments = uniform(models, 2)
    assert torch.equal(models.ours(**arguments).sample, models.stock(**arguments).sample)
    mixed = PaddedBatch.of(samples_of([[(3, 4)], [(2, 2)]]), fill=0.0)
    with pytest.raises(ValueError, match=rf"processor {doubled.__name__} is not used for samples of different sizes"):
        models.padded(mixed, attention_mask=mixed.mask)


@torch.no_grad()
def test_a_chosen_attention_backend_is_used_or_refused(models):
    mixed = PaddedBatch.of(samples_of([[(3, 4)], [(2, 2)]]), fill=0.0)
    models.ours.set_attention_backend("native")
    models.padded(mixed, attention_mask=mixed.mask)
    models.ours.set_attention_backend("_native_math")
    with pytest.raises(ValueError, match="backend"):
        models.padded(mixed, attention_mask=mixed.mask)


@pytest.mark.parametrize("name", BOTH)
def test_a_saved_pipeline_names_diffusers_classes_and_loads_anywhere(name, tmp_path):
    family = get_family(name)
    parts = {key: part for key, part in vars(family.tiny(0)).items() if part is not None}
    if "processor" in parts:  # diffusers' own class needs torchvision
        parts["processor"] = None
    pipeline = getattr(diffusers, family.pipeline)(**parts)
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", family.transformer.__name__]
    again = getattr(diffusers, family.pipeline).from_pretrained(
        tmp_path, **({"processor": None} if "processor" in parts else {})
    )
    stock = getattr(diffusers, family.transformer.__name__)
    assert type(again.transformer) is stock
    for key, tensor in parts["transformer"].state_dict().items():
        assert torch.equal(again.transformer.state_dict()[key], tensor)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["qwen-image", "qwen-image-edit", "qwen-image-edit-plus"])
def test_several_images_of_a_prompt_are_those_of_the_stock_class(name, count):
    family, images = get_family(name), []
    for stock in (False, True):
        parts = family.tiny(0)
        if stock:
            plain = diffusers.QwenImageTransformer2DModel.from_config(parts.transformer.config)
            plain.load_state_dict(parts.transformer.state_dict())
            parts.transformer = plain
        pipeline = getattr(diffusers, family.pipeline)(**{k: v for k, v in vars(parts).items() if v is not None})
        pipeline.set_progress_bar_config(disable=True)
        image = {} if name == "qwen-image" else {"image": Image.new("RGB", (64, 64), "teal")}
        with small_images(64 * 64):
            drawn = pipeline(
                prompt="make it red",
                negative_prompt="blue",
                num_images_per_prompt=count,
                num_inference_steps=2,
                height=64,
                width=64,
                generator=torch.Generator().manual_seed(0),
                output_type="pt",
                **image,
            )
        images.append(drawn.images)
    assert len(images[0]) == count
    assert torch.equal(*images)


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_one_entry_of_shapes_stands_for_all_images_of_its_prompt(zero_cond_t):
    models = Models("qwen-image-edit-plus, 2511" if zero_cond_t else "qwen-image-edit")
    samples = samples_of([[(3, 4), (2, 2)]] * 2 + [[(2, 3), (1, 5)]] * 2)
    batch = PaddedBatch.of(samples, fill=float("nan"))
    shapes = [list(samples[n].shapes.images) for n in (0, 2)]
    output = models.padded(batch, img_shapes=shapes)
    for sample, row in zip(samples, batch.outputs(output), strict=True):
        assert (row - models.alone(sample)).abs().max() <= 1e-5


@torch.no_grad()
def test_images_of_several_frames_equal_diffusers_whatever_the_text_masks():
    models = Models("qwen-image-edit")
    shapes = [(2, 3, 4), (1, 2, 2)]
    torch.manual_seed(0)
    images, texts = torch.randn(2, 28, 64), torch.randn(2, 7, 32)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 3:] = False
    sigma = torch.tensor([0.3, 0.8])
    output = models.ours(images, texts, mask, sigma, [shapes, shapes]).sample
    for row, length in enumerate((7, 3)):
        alone = models.stock(
            images[row : row + 1], texts[row : row + 1, :length], None, sigma[row : row + 1], [shapes]
        ).sample
        assert (output[row] - alone[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["bool", "additive", "all valid"])
@pytest.mark.parametrize("name", [name for name, reference in REFERENCES.items() if reference.batch is PaddedBatch])
def test_the_documents_calls_are_understood_and_deprecated(name, kind):
    """`attention_kwargs={"attention_mask": …}`, 1 and 0 or added to the scores, and `txt_seq_lens`."""
    models = Models(name)
    samples = samples_of([[(3, 4)]] * 2 if kind == "all valid" else [[(3, 4)], [(2, 2)]], text=[5, 5])
    batch = PaddedBatch.of(samples, fill=0.0)
    mask = batch.mask
    if kind != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    options = {models.reference.attention_kwargs: {"attention_mask": mask}}
    if "attention_kwargs" in options:
        options["txt_seq_lens"] = [5, 5]
    with pytest.warns(FutureWarning, match="deprecated"):
        output = models.padded(batch, **options)
    for sample, row in zip(samples, batch.outputs(output), strict=True):
        assert (row - models.alone(sample)).abs().max() <= 1e-5


def test_text_lengths_alone_are_a_text_mask():
    models = Models("qwen-image")
    samples = samples_of([[(3, 4)], [(3, 4)]], text=[7, 2])
    batch = PaddedBatch.of(samples, fill=float("nan"))
    with pytest.warns(FutureWarning, match="txt_seq_lens"):
        output = models.padded(batch, txt_seq_lens=[7, 2])
    for sample, row in zip(samples, output, strict=True):
        assert (row - models.alone(sample)).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="txt_seq_lens"), pytest.warns(FutureWarning):
        models.padded(batch, txt_seq_lens=[7, 20])


def test_a_mask_that_is_neither_is_named():
    models = Models("flux-kontext")
    batch = PaddedBatch.of(samples_of([[(3, 4)], [(2, 2)]]), fill=0.0)
    with pytest.raises(ValueError, match="additive"), pytest.warns(FutureWarning):
        models.padded(batch, joint_attention_kwargs={"attention_mask": torch.full(batch.mask.shape, -0.5)})


def test_the_class_is_its_own():
    assert FluxTransformer2DModel is not diffusers.FluxTransformer2DModel


@torch.no_grad()
def test_a_model_can_be_copied_and_sent_to_another_process(models):
    """As multiprocessing does it; the class goes by the name of another module."""
    expected = models.ours(**uniform(models)).sample
    for again in (copy.deepcopy(models.ours), pickle.loads(pickle.dumps(models.ours))):
        assert type(again) is type(models.ours)
        assert torch.equal(again(**uniform(models)).sample, expected)
