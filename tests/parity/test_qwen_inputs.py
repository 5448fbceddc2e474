"""What only Qwen's forward takes: shapes instead of a mask, a text mask, precomputed positions, t for controls."""

from __future__ import annotations

import pytest
import torch
from test_family_parity import CASES, assert_equal_to_alone

from family_samples import Models, PaddedBatch, samples_of
from qflux.models import QwenImageTransformer2DModel

IMAGES = [[(3, 4)], [(2, 5), (3, 3)], [(4, 2), (2, 2), (1, 7), (3, 3)]]


@pytest.fixture(scope="module")
def models() -> Models:
    return Models("qwen-image-edit-plus")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_shapes_and_a_text_mask_say_what_is_valid(models, dtype):
    samples = samples_of(IMAGES, text=[4, 9, 1])
    batch = PaddedBatch.of(samples, fill=float("nan"))
    output = models.padded(batch, encoder_hidden_states_mask=batch.text_mask.to(dtype))
    assert_equal_to_alone(models, samples, batch.outputs(output))


def test_precomputed_positions_replace_the_shapes(models):
    samples = samples_of(IMAGES, text=[4, 9, 1])
    batch = PaddedBatch.of(samples, fill=float("nan"))
    half = models.ours.config.attention_head_dim // 2
    image = torch.full((*batch.image.shape[:2], half), float("nan"), dtype=torch.complex64)
    text = torch.full((*batch.text.shape[:2], half), float("nan"), dtype=torch.complex64)
    for row, sample in enumerate(samples):
        turns = models.stock.pos_embed(
            [list(sample.shapes.images)], max_txt_seq_len=len(sample.text), device=image.device
        )
        image[row, : len(sample.image)], text[row, : len(sample.text)] = turns
    output = models.padded(batch, img_shapes=None, image_rotary_emb=(image, text), attention_mask=batch.mask)
    assert_equal_to_alone(models, samples, batch.outputs(output))


def test_a_text_with_a_hole_keeps_the_positions_of_its_tokens(models):
    """diffusers masks holes and leaves the other tokens where they are."""
    (sample,) = samples_of([[(3, 4)]])
    mask = torch.ones(1, 7, dtype=torch.bool)
    mask[0, 2] = False
    arguments = models.reference.alone(models.reference.fitted(sample))
    expected = models.stock(**arguments, encoder_hidden_states_mask=mask).sample
    output = models.ours(**arguments, encoder_hidden_states_mask=mask).sample
    assert (output - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_the_additional_condition_is_per_sample(zero_cond_t):
    models = Models("qwen-image-edit-plus, 2511" if zero_cond_t else "qwen-image-edit")
    torch.manual_seed(0)
    ours = QwenImageTransformer2DModel.from_config({**models.ours.config, "use_additional_t_cond": True})
    stock = models.reference.stock.from_config(ours.config)
    stock.load_state_dict(ours.state_dict())
    samples = samples_of(CASES["control unlike target"])
    batch = PaddedBatch.of(samples, fill=float("nan"))
    condition = torch.tensor([0, 1, 0])
    output = ours(**models.arguments(batch), additional_t_cond=condition, attention_mask=batch.mask).sample
    for row, sample in enumerate(samples):
        expected = stock(
            **models.reference.alone(models.reference.fitted(sample)), additional_t_cond=condition[row : row + 1]
        ).sample[0]
        assert (output[row, : len(sample.image)] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"img_shapes": [[(1, 3, 4)]] * 3}, "img_shapes has 3 samples"),
        ({"img_shapes": []}, "img_shapes has 0 samples"),
        ({"img_shapes": [[(1, 9, 9)], [(1, 2, 2)]]}, "asks for 81 image tokens"),
        ({"img_shapes": [[(1, 3, 3)], [(1, 2, 2)]]}, "disagree"),
        ({"encoder_hidden_states_mask": torch.ones(2, 3)}, "encoder_hidden_states_mask has shape"),
        ({"img_shapes": None}, "img_shapes is needed"),
        ({"guidance": torch.ones(2)}, "no guidance"),
        ({"controlnet_block_samples": [torch.zeros(1)]}, "ControlNet"),
    ],
)
def test_impossible_inputs_are_named(models, change, message):
    batch = PaddedBatch.of(samples_of([[(3, 4)], [(2, 2)]]), fill=0.0)
    with pytest.raises(ValueError, match=message):
        models.padded(batch, **{"attention_mask": batch.mask, **change})


def test_positions_beyond_the_table_are_named(models):
    with pytest.raises(ValueError, match="sample 1 has 1 images and needs 5002 positions"):
        models.ours.positions([[(1, 2, 2)], [(1, 4, 4)]], [5, 5000], torch.device("cpu"))
