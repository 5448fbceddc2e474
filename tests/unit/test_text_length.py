from __future__ import annotations

import pytest
from PIL import Image

from qflux.data.encoded import Prompt, TextLimit
from qflux.data.images.sizes import Transform
from qflux.models import FAMILIES, get_family

SIZES = [(32, 48), (64, 64), (28, 96)]
"""(height, width), which a family rounds to what it can show its text encoder."""


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize("text", ["x", "make the sky a little darker, please"])
def test_the_counted_length_is_the_encoded_length(name, images, text):
    family = get_family(name)
    components = family.tiny(0)
    sees_images = family.prompt_view(0, (64, 64), Transform((64, 64), "crop")) is not None
    step = family.size_multiple if family.size_multiple > 16 else 1
    sizes = [tuple(-(-side // step) * step for side in size) for size in SIZES[:images]] if sees_images else []
    limit = TextLimit(400)
    prompt = Prompt(text, images=tuple(Image.new("RGB", size[::-1], "teal") for size in sizes))
    encoded = family.encoder(components, limit).encode_text([prompt])[0]
    counted = family.text_counter(components, limit)(text, sizes)
    assert counted.used == len(encoded.tokens)
    assert counted.wanted <= 400


@pytest.mark.parametrize("name", FAMILIES)
def test_an_over_long_prompt_is_counted_as_it_is_and_used_as_it_is_cut(name):
    family = get_family(name)
    components = family.tiny(0)
    counted = family.text_counter(components, TextLimit(20, truncate=True))("word " * 50, [])
    assert counted.used == 20
    assert counted.wanted > 50
