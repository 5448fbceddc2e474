"""Qwen's encoders equal the pipelines' own: text alone, one image, several; batches equal one by one."""

from __future__ import annotations

import diffusers
import pytest
import torch

from helpers import picture
from qflux.data.encoded import Prompt, TextLimit
from qflux.errors import DataError
from qflux.models import get_family
from qflux.models.qwen_image.prompts import ONE_IMAGE, PICTURES, TEXT_TO_IMAGE, condition_size
from qflux.ragged.patches import pack
from qflux.ragged.shapes import token_shape


@pytest.fixture(scope="module")
def parts():
    return get_family("qwen-image-edit-plus").tiny(2)


def pipeline(name: str, parts):
    components = vars(parts).copy()
    if name == "QwenImagePipeline":
        del components["processor"]
    return getattr(diffusers, name)(**components)


def encoder(family: str, parts, limit: TextLimit | None = None):
    return get_family(family).encoder(parts, limit or TextLimit(1024))


def test_the_templates_drop_everything_up_to_the_users_words(parts):
    for template in (TEXT_TO_IMAGE, ONE_IMAGE):
        before = template.fill("§", 0).split("§")[0]
        assert len(parts.tokenizer(before).input_ids) == template.drop
    assert pipeline("QwenImagePipeline", parts).prompt_template_encode == TEXT_TO_IMAGE.fill("{}", 0)
    assert pipeline("QwenImageEditPipeline", parts).prompt_template_encode == ONE_IMAGE.fill("{}", 1)
    assert pipeline("QwenImageEditPlusPipeline", parts).prompt_template_encode == PICTURES.fill("{}", 0)


def test_text_alone_equals_the_pipelines(parts):
    prompts = ["make it red", "a much longer prompt with many more words in it", " "]
    with torch.no_grad():
        expected, mask = pipeline("QwenImagePipeline", parts).encode_prompt(prompts)
    for row, embedding in enumerate(encoder("qwen-image", parts).encode_text([Prompt(p) for p in prompts])):
        own = expected[row][mask[row].bool()]
        assert embedding.tokens.shape == own.shape
        assert (embedding.tokens - own).abs().max() <= 1e-5


def test_one_image_equals_the_pipelines(parts):
    image = picture(100, 60)
    with torch.no_grad():
        expected, _ = pipeline("QwenImageEditPipeline", parts).encode_prompt("make it red", image=image)
    (embedding,) = encoder("qwen-image-edit", parts).encode_text([Prompt("make it red", images=(image,))])
    assert (embedding.tokens - expected[0]).abs().max() <= 1e-5


def test_three_images_of_different_sizes_equal_the_pipelines(parts):
    images = [picture(100, 60), picture(64, 64, 1), picture(50, 120, 2)]
    with torch.no_grad():
        expected, _ = pipeline("QwenImageEditPlusPipeline", parts).encode_prompt("swap them", image=images)
    (embedding,) = encoder("qwen-image-edit-plus", parts).encode_text([Prompt("swap them", images=tuple(images))])
    assert (embedding.tokens - expected[0]).abs().max() <= 1e-5


def test_a_batch_of_mixed_prompts_equals_one_by_one(parts):
    encode = encoder("qwen-image-edit-plus", parts).encode_text
    prompts = [
        Prompt("put them together", images=(picture(60, 60), picture(30, 90, 1), picture(90, 40, 2))),
        Prompt("nothing to see here, but many words"),
        Prompt("one", images=(picture(100, 60, 3),)),
    ]
    for prompt, together in zip(prompts, encode(prompts), strict=True):
        (alone,) = encode([prompt])
        assert together.tokens.shape == alone.tokens.shape
        assert (together.tokens - alone.tokens).abs().max() <= 1e-5


def test_the_same_words_with_another_image_are_another_embedding(parts):
    encode = encoder("qwen-image-edit", parts).encode_text
    first, second = encode([Prompt("x", images=(picture(60, 60),)), Prompt("x", images=(picture(60, 60, 5),))])
    assert (first.tokens - second.tokens).abs().max() > 1e-3


def test_a_prompt_beyond_the_limit_is_an_error_or_cut_and_counted(parts):
    prompt = Prompt("many words in a long prompt")
    with pytest.raises(DataError, match="longer than 6: 'many words"):
        encoder("qwen-image", parts, TextLimit(6)).encode_text([prompt])
    limit = TextLimit(6, truncate=True)
    (embedding,) = encoder("qwen-image", parts, limit).encode_text([prompt])
    assert (len(embedding.tokens), limit.cut) == (6, 1)


@pytest.mark.parametrize("size", [(64, 64), (48, 96)])
def test_images_equal_the_pipelines_and_come_back_in_shape(parts, size):
    pixels = torch.rand(3, *size) * 2 - 1
    encode = encoder("qwen-image-edit", parts)
    with torch.no_grad():
        expected = pipeline("QwenImageEditPipeline", parts)._encode_vae_image(pixels[None, :, None], None)
    tokens = encode.encode_images([pixels])[0]
    assert (tokens - pack(expected[0, :, 0])).abs().max() <= 1e-5
    assert encode.decode_image(tokens, token_shape(*size)).shape == (3, *size)


def test_slicing_and_tiling_work_on_large_images(parts):
    parts.vae.enable_tiling()
    try:
        tokens = encoder("qwen-image-edit", parts).encode_images([torch.rand(3, 320, 272) * 2 - 1])[0]
    finally:
        parts.vae.disable_tiling()
    assert tokens.shape == (20 * 17, 64)


@pytest.mark.parametrize("size", [(384, 384), (1000, 500), (333, 777), (64, 40)])
def test_the_size_of_a_condition_image_is_the_pipelines(size):
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE, calculate_dimensions

    width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, size[0] / size[1])
    assert condition_size(*size) == (height, width)


def test_prompt_ids_and_pixels_are_the_full_processors(parts):
    pytest.importorskip("torchvision", reason="the full Qwen2.5-VL processor needs torchvision for its video part")
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

    full = Qwen2_5_VLProcessor(parts.processor.image_processor, parts.tokenizer, Qwen2VLVideoProcessor())
    images = [picture(100, 60), picture(64, 64, 1)]
    text = [PICTURES.fill("swap them", 2)]
    ours, theirs = parts.processor(text, images), full(text=text, images=images, padding=True, return_tensors="pt")
    for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw"):
        assert torch.equal(ours[name], theirs[name])
