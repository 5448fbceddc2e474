"""What comes out works in diffusers: the LoRA loads with every key, and the pipeline paints the same image."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from peft.utils import get_peft_model_state_dict
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qflux.adapters.attach import Weighted, attach_all
from qflux.commands import Trainer
from qflux.config import ProcessorSettings
from qflux.data.images.decode import ImageFile, load_rgb
from qflux.errors import CheckpointError
from qflux.models import get_family
from qflux.sampling.predictor import Edit


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkpoint, data_set, cache):
    """A config and a LoRA with alpha other than the rank, trained hard enough to be seen."""
    from conftest import make_config

    settings = make_config(
        checkpoint,
        data_set,
        cache,
        tmp_path_factory.mktemp("runs"),
        "lora.alpha=10",
        "train.max_train_steps=12",
        "optimizer.init_args={lr: 0.03}",
        "predict.num_inference_steps=4",
        "predict.preprocessing=config",
    )
    return settings, Trainer(settings).fit().adapter


def control_image(data_set, size=(128, 96)) -> Image.Image:
    return load_rgb(ImageFile(data_set / "control_images/scene_001.png")).resize(size)


def pipeline_image(pipe, image, prompt, seed, steps, negative=None) -> np.ndarray:
    return pipe(
        image=image,
        prompt=prompt,
        negative_prompt=negative,
        true_cfg_scale=2.5 if negative else 1.0,
        height=image.height,
        width=image.width,
        max_area=image.height * image.width,
        _auto_resize=False,
        num_inference_steps=steps,
        guidance_scale=3.5,
        max_sequence_length=64,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images[0]


def qflux_image(trainer, image, prompt, seed, lora=None, negative=None) -> np.ndarray:
    """In floating point: an 8-bit image would hide errors below 1/255."""
    predictor = trainer.predictor([Weighted(lora)] if lora else ())
    edit = Edit((image,), prompt, negative_prompt=negative, seed=seed)
    ((tokens, shape),) = predictor.latents([edit], trainer.config.predict.num_inference_steps, 3.5)
    pixels = predictor._encoder.decode_image(tokens, shape)
    return (pixels / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("negative", [None, "blurry"], ids=["no CFG", "true CFG"])
@pytest.mark.parametrize("with_lora", [False, True], ids=["base", "LoRA"])
def test_predict_and_the_pipeline_give_the_same_image(trained, checkpoint, data_set, with_lora, negative):
    settings, adapter = trained
    settings = settings.model_copy(
        update={
            "data": settings.data.model_copy(update={"processor": ProcessorSettings(target_size=(96, 128))}),
            "predict": settings.predict.model_copy(update={"true_cfg_scale": 2.5}),
        }
    )
    pipe = FluxKontextPipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    if with_lora:
        pipe.load_lora_weights(adapter.parent)
    image = control_image(data_set)
    ours = qflux_image(Trainer(settings), image, "make the star blue", 7, adapter if with_lora else None, negative)
    theirs = pipeline_image(pipe, image, "make the star blue", 7, 4, negative)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-4
    if with_lora or negative:
        assert np.abs(ours - qflux_image(Trainer(settings), image, "make the star blue", 7)).max() > 1e-3


def test_the_lora_loads_into_the_pipeline_with_no_unexpected_or_missing_key(trained, checkpoint, caplog):
    _, adapter = trained
    pipe = FluxKontextPipeline.from_pretrained(checkpoint)
    logging.getLogger("diffusers").propagate = True
    with caplog.at_level(logging.WARNING):
        pipe.load_lora_weights(adapter.parent)
    assert not [record.message for record in caplog.records if "led to" in record.message]
    saved = load_file(adapter)
    loaded = get_peft_model_state_dict(pipe.transformer, adapter_name=pipe.get_active_adapters()[0])
    assert {f"transformer.{name}" for name in loaded} == {name for name in saved if not name.endswith(".alpha")}
    for name, tensor in loaded.items():
        assert torch.equal(tensor, saved[f"transformer.{name}"])
    blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    scales = {float(layer.scaling[name]) for b in blocks for layer in [b.attn.to_q] for name in layer.scaling}
    assert scales == {10 / 4}, "alpha over rank"


def test_a_mixed_batch_of_edits_equals_one_by_one(trained, data_set):
    settings, adapter = trained
    predictor = Trainer(settings).predictor([Weighted(adapter)])
    wide, tall = control_image(data_set, (176, 80)), control_image(data_set, (80, 128))
    edits = [
        Edit((wide,), "make the star blue", seed=1),
        Edit((tall, wide), "give it the colour of the second image", seed=2),
        Edit((), "a red circle", seed=3, size=(96, 64)),
        Edit((wide,), "make it green", seed=4, size=(64, 64)),
        Edit((tall, tall, wide), "all of them", negative_prompt="none", seed=5),
        Edit((tall,), "", seed=6, size=(112, 48)),
    ]
    alone = [predictor.latents([edit], 3, 3.5)[0] for edit in edits]
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1]):
        together = predictor.latents([edits[row] for row in order], 3, 3.5)
        for row, (tokens, shape) in zip(order, together, strict=True):
            expected, expected_shape = alone[row]
            assert shape == expected_shape
            assert (tokens - expected).abs().max() <= 1e-5


def load(file) -> None:
    family = get_family("flux-kontext")
    attach_all(family.tiny(0).transformer, family, [Weighted(file)])


def _without(weights, name):
    return {key: tensor for key, tensor in weights.items() if key != name}


DAMAGE = {
    "half a pair": (_without, "has no down projection"),
    "unknown part": (lambda w, k: {**_without(w, k), k.replace("lora_A", "lora_X"): w[k]}, "is no LoRA weight"),
    "wrong width": (lambda w, k: {**w, k: torch.zeros(4, 7)}, "has shapes"),
    "wrong rank": (lambda w, k: {**w, k: torch.zeros(3, w[k].shape[1])}, "their ranks do not fit"),
    "not a number": (lambda w, k: {**w, k: w[k] * float("nan")}, "no numbers"),
    "nothing": (lambda w, k: {}, "holds no tensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_lora_is_refused_by_name(trained, tmp_path, damage):
    _, adapter = trained
    change, message = DAMAGE[damage]
    weights = load_file(adapter)
    first = next(key for key in sorted(weights) if ".lora_A" in key)
    save_file(change(weights, first), tmp_path / "damaged.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "damaged.safetensors")


def test_a_lora_that_lacks_a_layer_of_its_own_description_is_refused(trained, tmp_path):
    _, adapter = trained
    with safe_open(adapter, framework="pt") as opened:
        metadata = opened.metadata()
    weights = load_file(adapter)
    layer = sorted(weights)[0].rsplit(".", 1)[0]
    kept = {key: tensor for key, tensor in weights.items() if not key.startswith(f"{layer}.")}
    save_file(kept, tmp_path / "short.safetensors", metadata)
    with pytest.raises(CheckpointError, match="which its own record names"):
        load(tmp_path / "short.safetensors")


def test_a_lora_for_another_model_is_refused_by_name(trained, tmp_path):
    _, adapter = trained
    weights = load_file(adapter)
    for part in ("lora_A.weight", "lora_B.weight"):
        weights[f"transformer.layers.99.attn.to_q.{part}"] = torch.zeros(4, 4)
    save_file(weights, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.99\.attn\.to_q"):
        load(tmp_path / "foreign.safetensors")
    (tmp_path / "garbage.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load(tmp_path / "garbage.safetensors")
