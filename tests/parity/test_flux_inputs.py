"""What only FLUX's forward takes: position ids, shared or per sample."""

from __future__ import annotations

import pytest
import torch
from test_family_parity import assert_equal_to_alone

from family_samples import Models, PaddedBatch, samples_of


@pytest.fixture(scope="module")
def models() -> Models:
    return Models("flux-kontext")


def test_shared_image_ids_with_a_mask_equal_the_sample_alone(models):
    """`img_ids` `(S, 3)`: samples are prefixes of one grid, cut off by the mask."""
    samples = samples_of([[(6, 4)], [(3, 4)]])
    batch = PaddedBatch.of(samples, fill=float("nan"))
    output = models.padded(batch, img_ids=models.arguments(batch)["img_ids"][0], attention_mask=batch.mask)
    assert_equal_to_alone(models, samples, batch.outputs(output))


def test_per_sample_image_ids_need_no_mask(models):
    """Same length, other shapes: stock diffusers would give every sample the first one's positions."""
    samples = samples_of([[(3, 4)], [(4, 3)], [(2, 6)]])
    assert_equal_to_alone(models, samples, models.padded(PaddedBatch.of(samples, fill=0.0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"img_ids": torch.zeros(3, 3)}, "img_ids has shape"),
        ({"txt_ids": torch.zeros(9, 3)}, "txt_ids has shape"),
        ({"controlnet_block_samples": [torch.zeros(1)]}, "ControlNet"),
        ({"joint_attention_kwargs": {"ip_adapter_image_embeds": []}}, "ip_adapter_image_embeds"),
    ],
)
def test_impossible_inputs_are_named(models, change, message):
    batch = PaddedBatch.of(samples_of([[(3, 4)], [(2, 2)]]), fill=0.0)
    with pytest.raises(ValueError, match=message):
        models.padded(batch, **{"attention_mask": batch.mask, **change})
