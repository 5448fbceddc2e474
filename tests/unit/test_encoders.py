"""The encoders equal `FluxKontextPipeline`'s own."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxKontextPipeline

from qflux.data.encoded import Prompt, TextLimit
from qflux.errors import DataError
from qflux.models import get_family
from qflux.ragged.patches import pack
from qflux.ragged.shapes import token_shape


@pytest.fixture(scope="module")
def components():
    return get_family("flux-kontext").tiny(3)


@pytest.fixture(scope="module")
def pipe(components):
    return FluxKontextPipeline(**vars(components))


@pytest.fixture(scope="module")
def encoder(components):
    return get_family("flux-kontext").encoder(components, TextLimit(64))


def test_text_equals_the_pipelines(pipe, encoder):
    prompts = [Prompt("make it red"), Prompt("a short one", "and a longer one for T5"), Prompt("")]
    for prompt, embedding in zip(prompts, encoder.encode_text(prompts), strict=True):
        tokens, pooled, _ = pipe.encode_prompt(prompt.text, prompt.text_2, max_sequence_length=64)
        assert (embedding.tokens - tokens[0]).abs().max() <= 1e-5
        assert (embedding.pooled - pooled[0]).abs().max() <= 1e-5


def test_a_prompt_beyond_the_limit_is_an_error_or_cut_and_counted(components, encoder):
    with pytest.raises(DataError, match="longer than 64"):
        encoder.encode_text([Prompt("word " * 40)])
    limit = TextLimit(64, truncate=True)
    (embedding,) = get_family("flux-kontext").encoder(components, limit).encode_text([Prompt("word " * 40)])
    assert (len(embedding.tokens), limit.cut) == (64, 1)


@pytest.mark.parametrize("size", [(64, 64), (48, 96), (112, 32)])
def test_images_equal_the_pipelines_and_come_back_in_shape(pipe, encoder, size):
    pixels = torch.rand(3, *size) * 2 - 1
    tokens = encoder.encode_images([pixels])[0]
    with torch.no_grad():
        expected = pack(pipe._encode_vae_image(pixels[None], None)[0])
    assert (tokens - expected).abs().max() <= 1e-5
    assert encoder.decode_image(tokens, token_shape(*size)).shape == (3, *size)


def test_tiny_is_a_function_of_its_seed():
    family = get_family("flux-kontext")
    before = torch.random.get_rng_state()
    first, same, other = (family.tiny(seed).transformer.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(torch.random.get_rng_state(), before)
