"""What comes out of a Qwen run works in diffusers: the same image with true CFG on, and a LoRA with every key."""

from __future__ import annotations

import logging

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from peft.utils import get_peft_model_state_dict
from PIL import Image

from qflux.adapters.attach import Weighted
from qflux.adapters.files import read_adapter
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.demo.data import write_data_set
from qflux.errors import DataError
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.sampling.predictor import Edit

WIDTH, HEIGHT = 128, 96
FAMILIES = ["qwen-image", "qwen-image-edit", "qwen-image-edit-plus"]


@pytest.fixture(scope="module", params=FAMILIES)
def project(request, tmp_path_factory):
    """Family, config, components and a trained LoRA."""
    folder = tmp_path_factory.mktemp(request.param)
    family = get_family(request.param)
    parts = family.tiny(0)
    save_checkpoint(parts, folder / "model", family.pipeline)
    write_data_set(folder / "data", 6, 0, edits=family.controls != (0, 0))
    config = load_config(
        {
            "family": request.param,
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
            "predict": {"num_inference_steps": 3, "preprocessing": "config"},
        }
    )
    trainer = Trainer(config)
    trainer.cache()
    return family, trainer, parts, trainer.fit().adapter


def reference(family, parts):
    components = {name: part for name, part in vars(parts).items() if part is not None}
    stock = diffusers.QwenImageTransformer2DModel.from_config(parts.transformer.config)
    stock.load_state_dict(parts.transformer.state_dict())
    pipe = getattr(diffusers, family.pipeline)(**{**components, "transformer": stock})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def controls_of(family) -> list[Image.Image]:
    images = [picture(WIDTH, HEIGHT, 1), picture(HEIGHT, WIDTH, 2)]
    return {"qwen-image": [], "qwen-image-edit": images[:1], "qwen-image-edit-plus": images}[family.name]


def ours_as_pixels(trainer, edit, lora) -> np.ndarray:
    predictor = trainer.predictor([Weighted(lora)] if lora else ())
    ((tokens, shape),) = predictor.latents([edit])
    return (predictor._encoder.decode_image(tokens, shape) / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("with_lora", [False, True], ids=["base", "LoRA"])
@pytest.mark.parametrize("negative", [None, "blurry"], ids=["no CFG", "true CFG"])
def test_a_prediction_equals_the_reference_pipelines(project, monkeypatch, negative, with_lora):
    family, trainer, parts, adapter = project
    # The pipelines bring images to 1024 x 1024 pixels; a tiny model is compared at a tiny size.
    area, dimensions = WIDTH * HEIGHT, pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: dimensions(area, ratio))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", area)
    pipe = reference(family, parts)
    if with_lora:
        pipe.load_lora_weights(adapter.parent)
    controls = controls_of(family)
    image = {"image": controls if len(controls) > 1 else controls[0]} if controls else {}
    expected = pipe(
        **image,
        prompt="make it red",
        negative_prompt=negative,
        true_cfg_scale=4.0,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
    ).images[0]
    edit = Edit(tuple(controls), "make it red", negative_prompt=negative, seed=11, size=(HEIGHT, WIDTH))
    output = ours_as_pixels(trainer, edit, adapter if with_lora else None)
    assert np.abs(output - expected).max() <= 1e-4


def test_a_mixed_batch_of_edits_equals_one_by_one(project):
    family, trainer, _, adapter = project
    predictor = trainer.predictor([Weighted(adapter)])
    counts = {"qwen-image": [0] * 6, "qwen-image-edit": [1, 2, 1, 3, 1, 2], "qwen-image-edit-plus": [0, 1, 2, 4, 3, 1]}
    sizes = [(96, 64), (64, 64), (48, 112), (80, 80), (64, 96), (112, 48)]
    edits = [
        Edit(
            tuple(picture(60 + 10 * i, 90, i) for i in range(count)),
            f"edit number {row}",
            negative_prompt="bad" if row % 2 else None,
            seed=row,
            size=sizes[row],
        )
        for row, count in enumerate(counts[family.name])
    ]
    alone = [predictor.latents([edit])[0][0] for edit in edits]
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1]):
        together = predictor.latents([edits[row] for row in order])
        for row, (tokens, _) in zip(order, together, strict=True):
            assert (tokens - alone[row]).abs().max() <= 1e-5


def test_the_lora_loads_with_no_unexpected_or_missing_key(project, caplog):
    family, _, parts, adapter = project
    pipe = reference(family, parts)
    logging.getLogger("diffusers").propagate = True
    with caplog.at_level(logging.WARNING):
        pipe.load_lora_weights(adapter.parent)
    assert not [record.message for record in caplog.records if "led to" in record.message]
    (name,) = pipe.get_active_adapters()
    loaded = get_peft_model_state_dict(pipe.transformer, adapter_name=name)
    layers = read_adapter(adapter).layers(family, get_family(family.name).tiny(0).transformer)
    assert {key.rpartition(".lora_")[0] for key in loaded} == set(layers)
    for layer, trained in layers.items():  # diffusers multiplies the strength into the matrices
        scale = pipe.transformer.get_submodule(layer).scaling[name]
        effect = scale * loaded[f"{layer}.lora_B.weight"] @ loaded[f"{layer}.lora_A.weight"]
        assert torch.allclose(effect, trained.scale * trained.up @ trained.down, atol=1e-7)


WRONG_COUNT = {"qwen-image": 1, "qwen-image-edit": 0, "qwen-image-edit-plus": 4096}


def test_the_wrong_number_of_controls_is_named(project):
    family, trainer, _, _ = project
    controls = (picture(64, 64, 0),) * WRONG_COUNT[family.name]
    with pytest.raises(DataError, match=f"{len(controls)} control images; {family.name} takes"):
        trainer.predictor().latents([Edit(controls, "x")])
