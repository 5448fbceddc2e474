"""FLUX.2 as its pipelines feed it: images of any size, any number of them, prompts of any length."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
import torch

from family_samples import REFERENCES, Models, lora_parameters
from published import photo
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.encoded import Prompt, TextLimit
from qflux.errors import DataError
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.sampling.predictor import Edit

FLUX2 = ["flux2", "flux2, dev"]


def pipeline(name):
    reference = REFERENCES[name]
    parts = {key: part for key, part in vars(reference.components(0)).items() if part is not None}
    pipe = getattr(diffusers, reference.pipeline_name)(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def predicted(name, folder, edit):
    reference = REFERENCES[name]
    save_checkpoint(reference.components(0), folder / "model", reference.pipeline_name)
    settings = {
        "family": "flux2",
        "model": {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(folder)},
        "predict": {"num_inference_steps": 2},
    }
    predictor = Trainer(load_config(settings)).predictor()
    ((tokens, shape),) = predictor.latents([edit])
    return (predictor._encoder.decode_image(tokens, shape) / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    "sizes",
    [
        [(101, 67)],
        [(333, 117), (64, 200)],
        [(160, 90), (90, 160), (80, 72)],
        pytest.param([(1500, 1100)], marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FLUX2)
def test_images_of_any_size_give_the_pipelines_image(name, sizes, tmp_path):
    """Nobody says how large the result should be or how it is guided: both go by what the pipeline does then."""
    images = [photo(*size, seed) for seed, size in enumerate(sizes)]
    options = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(3), "output_type": "np"}
    expected = pipeline(name)(image=images, prompt="make it snow", **options).images[0]
    output = predicted(name, tmp_path, Edit(tuple(images), "make it snow", seed=3))
    assert output.shape == expected.shape
    assert np.abs(output - expected).max() <= 1e-4


@pytest.mark.parametrize("words", ["", "make it snow", "many words " * 400], ids=["none", "few", "too many"])
@pytest.mark.parametrize("name", FLUX2)
def test_prompts_are_encoded_as_in_the_pipeline_with_their_padding(name, words):
    reference = REFERENCES[name]
    with torch.no_grad():
        expected, _ = pipeline(name).encode_prompt(words, max_sequence_length=512)
    encoder = get_family("flux2").encoder(reference.components(0), TextLimit(512, truncate=True))
    (embedding,) = encoder.encode_text([Prompt(words)])
    assert embedding.is_cut == (len(words) > 100)
    assert embedding.tokens.shape == expected[0].shape
    assert (embedding.tokens - expected[0]).abs().max() <= 1e-5
    counted = get_family("flux2").text_counter(reference.components(0), TextLimit(512, truncate=True))(words, [])
    assert counted.used == 512
    assert (counted.wanted > 512) == embedding.is_cut


@pytest.mark.parametrize("name", FLUX2)
def test_a_prompt_that_is_too_long_is_an_error_unless_it_may_be_cut(name):
    encoder = get_family("flux2").encoder(REFERENCES[name].components(0), TextLimit(512))
    with pytest.raises(DataError, match="512"):
        encoder.encode_text([Prompt("many words " * 400)])


@pytest.mark.parametrize("count", [1, 2])
def test_where_diffusers_blocks_have_wrong_gradients_single_samples_run_in_ours(count, monkeypatch):
    """cuDNN's attention takes a gradient that is a slice for a whole one; it is asked for none."""
    models = Models("flux2")
    shapes = [[(3, 4), (2, 3)]] * count
    expected = gradients(models, shapes)
    monkeypatch.setattr(type(models.ours), "_stock", lambda *_: pytest.fail("diffusers' own blocks ran"))
    monkeypatch.setattr("qflux.models.flux2.transformer.needs_contiguous_gradient", lambda _: True)
    torch.testing.assert_close(gradients(models, shapes), expected, rtol=1e-5, atol=1e-5)


def test_an_ordinary_batch_does_without_that_kernel(monkeypatch):
    """Called as diffusers' class is called, it runs diffusers' blocks; cuDNN's attention may not be chosen there."""
    models = Models("flux2")
    transformer, allowed = models.ours, []
    inputs = {
        "hidden_states": torch.randn(2, 12, transformer.config.in_channels),
        "encoder_hidden_states": torch.randn(2, 5, transformer.config.joint_attention_dim),
        "timestep": torch.tensor([0.3, 0.8]),
        "guidance": torch.tensor([3.5, 3.5]) if transformer.config.guidance_embeds else None,
        "img_ids": torch.randint(0, 9, (12, 4)),
        "txt_ids": torch.randint(0, 9, (5, 4)),
        "return_dict": False,
    }
    block = transformer.single_transformer_blocks[0]
    block.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    (expected,) = transformer(**inputs)
    monkeypatch.setattr("qflux.models.flux2.transformer.needs_contiguous_gradient", lambda _: True)
    torch.testing.assert_close(transformer(**inputs)[0], expected, rtol=1e-5, atol=1e-5)
    assert allowed == [True, False]


def gradients(models, shapes):
    samples = [models.reference.fitted(sample) for sample in models.samples(shapes)]
    loss = sum((output * sample.upstream[: len(output)]).sum() for output, sample in
               zip(models.packed(samples), samples, strict=True))  # fmt: skip
    return torch.cat([found.flatten() for found in torch.autograd.grad(loss, lora_parameters(models.ours))])
