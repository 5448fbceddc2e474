"""Transparency in the data: kept where a model has it, white where it has none, and in what predictions are written."""

from __future__ import annotations

import json

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.encoded import COMPLETE, Prompt, TextLimit
from qflux.data.images.pixels import to_pixels
from qflux.errors import ConfigError, DataError
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.sampling.jobs.gallery import encoded
from qflux.sampling.predictor import Edit


def cut_out(seed: int, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """A coloured disc on nothing."""
    width, height = size
    rows, columns = np.mgrid[:height, :width]
    inside = (rows - height / 2) ** 2 + (columns - width / 2) ** 2 < (height / 3) ** 2
    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(np.dstack([colours, np.where(inside, 255, 0).astype(np.uint8)]))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transparent")
    for kind in ("training_images", "control_images"):
        (folder / kind).mkdir()
    for number in range(3):
        cut_out(number).save(folder / "training_images" / f"{number}.png")
        cut_out(10 + number).save(folder / "control_images" / f"{number}.png")
        (folder / "training_images" / f"{number}.txt").write_text("recolour it")
    return folder


def trainer(name: str, data, folder) -> Trainer:
    family = get_family(name)
    save_checkpoint(family.tiny(0), folder / "model", family.pipeline)
    settings = {
        "family": name,
        "output_dir": str(folder / "runs"),
        "model": {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(data), "batch_size": 2, "processor": {"target_size": [64, 96]}},
        "train": {"max_train_steps": 1},
        "predict": {"num_inference_steps": 2},
    }
    return Trainer(load_config(settings))


def test_transparency_trains_where_the_model_has_it(data, tmp_path):
    made = trainer("qwen-image-2.1", data, tmp_path)
    made.cache()
    encoder = made.pretrained.encoder("image")
    for sample in made.samples().training:
        stored = sample.embeddings.load(COMPLETE)
        own = Image.open(sample.own_images.target.ref.path)
        assert torch.allclose(stored.target, encoder.encode_images([to_pixels(own)])[0], atol=1e-5)
        opaque = own.copy()
        opaque.putalpha(255)
        assert not torch.allclose(stored.target, encoder.encode_images([to_pixels(opaque)])[0], atol=1e-3)
    assert made.fit().steps == 1


def test_elsewhere_it_is_white(data, tmp_path):
    made = trainer("flux2", data, tmp_path)
    made.cache()
    encoder = made.pretrained.encoder("image")
    sample = made.samples().training[0]
    own = Image.open(sample.own_images.target.ref.path)
    white = Image.alpha_composite(Image.new("RGBA", own.size, "white"), own).convert("RGB")
    stored = sample.embeddings.load(COMPLETE).target
    assert torch.allclose(stored, encoder.encode_images([to_pixels(white)])[0], atol=1e-5)


def test_the_text_encoder_sees_images_over_white():
    family = get_family("qwen-image-2.1")
    encoder = family.encoder(family.tiny(0), TextLimit(100))
    own = cut_out(1)
    white = Image.alpha_composite(Image.new("RGBA", own.size, "white"), own).convert("RGB")
    seen, same = (encoder.encode_text([Prompt("x", images=(image,))])[0].tokens for image in (own, white))
    assert torch.equal(seen, same)


@pytest.mark.parametrize("suffix", [".png", ".webp", ".jpg"])
def test_predictions_are_written_with_what_the_format_has(data, tmp_path, suffix):
    made = trainer("qwen-image-2.1", data, tmp_path)
    (image,) = made.predictor()([Edit((cut_out(5),), "x", size=(64, 96))])
    assert image.mode == "RGBA"
    (tmp_path / f"out{suffix}").write_bytes(encoded(image, suffix, {}))
    back = Image.open(tmp_path / f"out{suffix}")
    assert back.size == image.size
    assert ("A" in back.getbands()) == (suffix != ".jpg")


def test_sizes_that_are_no_multiples_of_32_are_named(data, tmp_path):
    made = trainer("qwen-image-2.1", data, tmp_path)
    with pytest.raises(ConfigError, match=r"\[48, 96\] are not multiples of 32, as qwen-image-2.1 needs"):
        load_config({**made.config.dump(), "data": {"path": str(data), "processor": {"target_size": [48, 96]}}})
    with pytest.raises(ConfigError, match="are not multiples of 32"):
        load_config({**made.config.dump(), "data": {"path": str(data), "processor": {"multi_resolutions": "kontext"}}})
    with pytest.raises(DataError, match=r"the size 48x96 is not possible"):
        made.predictor().latents([Edit((), "x", size=(48, 96))])


def test_the_authors_noise_levels_are_the_schedule(data, tmp_path):

    made = trainer("qwen-image-2.1", data, tmp_path)
    index = tmp_path / "model" / "model_index.json"
    levels = [1.0, 0.9, 0.5]
    index.write_text(json.dumps({**json.loads(index.read_text()), "sample_sigmas": levels}))
    assert made.pretrained.facts.num_inference_steps == 3
    made = Trainer(load_config({**made.config.dump(), "predict": {}}))
    parts = made.pretrained.components(("transformer", "scheduler", "text_encoder", "processor", "vae"))

    pipe = diffusers.QwenImage21Pipeline(**vars(parts), sample_sigmas=levels)
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(prompt="x", height=64, width=96, generator=torch.Generator().manual_seed(3), output_type="latent")
    ((tokens, _),) = made.predictor().latents([Edit((), "x", seed=3, size=(64, 96))])
    assert (tokens - expected.images[0]).abs().max() <= 1e-4
