from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from PIL import Image

from qflux.data.images.decode import ImageFile, load_mask, load_rgb, read_facts
from qflux.data.images.pixels import to_image, to_pixels
from qflux.errors import DataError


def test_exif_orientation_is_applied_to_pixels_and_size(tmp_path):
    image = Image.new("RGB", (40, 20), "black")
    image.paste("red", (0, 0, 40, 5))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: shown rotated by 90 degrees clockwise
    image.save(tmp_path / "turned.jpg", exif=exif, quality=95)
    loaded = load_rgb(ImageFile(tmp_path / "turned.jpg"))
    assert loaded.size == read_facts(ImageFile(tmp_path / "turned.jpg")).size == (20, 40)
    assert np.asarray(loaded)[20, 18, 0] > 200
    assert np.asarray(loaded)[20, 2, 0] < 50


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_composited_onto_white(tmp_path, mode):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    image.convert(mode).save(tmp_path / "image.png")
    pixels = np.asarray(load_rgb(ImageFile(tmp_path / "image.png")))
    assert (pixels[:, :4] == 0).all()
    assert (pixels[:, 4:] == 255).all()


def test_grey_and_palette_images_become_rgb(tmp_path):
    for mode in ("L", "P", "1", "CMYK"):
        Image.new("RGB", (4, 4), "white").convert(mode).save(tmp_path / f"{mode}.tif")
        assert load_rgb(ImageFile(tmp_path / f"{mode}.tif")).mode == "RGB"


def test_16_bit_grey_is_scaled(tmp_path):
    Image.fromarray(np.array([[0, 32768, 65535]], dtype=np.uint16)).save(tmp_path / "deep.png")
    assert np.asarray(load_rgb(ImageFile(tmp_path / "deep.png")))[0, :, 0].tolist() == [0, 128, 255]
    assert np.asarray(load_mask(ImageFile(tmp_path / "deep.png")))[0].tolist() == [0, 128, 255]


def test_broken_files_are_named(tmp_path):
    whole = tmp_path / "whole.png"
    Image.effect_noise((200, 200), 80).save(whole)
    truncated = tmp_path / "truncated.png"
    truncated.write_bytes(whole.read_bytes()[:2000])
    text = tmp_path / "text.png"
    text.write_text("no image")
    Image.new("F", (4, 4)).save(tmp_path / "float.tif")
    for path in (truncated, text, tmp_path / "float.tif", tmp_path / "absent.png"):
        with pytest.raises(DataError, match=path.name):
            load_rgb(ImageFile(path))


def test_pixels_are_what_diffusers_image_processor_makes(tmp_path):
    from diffusers.image_processor import VaeImageProcessor

    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    expected = VaeImageProcessor(vae_scale_factor=16).preprocess(image, 32, 48)[0]
    assert torch.equal(to_pixels(image), expected)
    assert np.array_equal(np.asarray(to_image(to_pixels(image))), np.asarray(image))


def test_the_size_of_a_png_is_known_without_decoding_it(tmp_path):
    image = Image.effect_noise((60, 20), 90)
    exif = Image.Exif()
    exif[0x0112] = 8
    image.save(tmp_path / "turned.png", exif=exif)
    data = (tmp_path / "turned.png").read_bytes()
    place = data.index(b"IDAT")
    (tmp_path / "damaged.png").write_bytes(data[: place + 10] + b"\0" * 20 + data[place + 30 :])
    assert (
        read_facts(ImageFile(tmp_path / "turned.png")).size
        == read_facts(ImageFile(tmp_path / "damaged.png")).size
        == (20, 60)
    )
    assert load_rgb(ImageFile(tmp_path / "turned.png")).size == (20, 60)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_header_and_pixels_agree_on_every_orientation(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (40, 20), "white")
    image.paste("black", (0, 0, 10, 10))
    image.save(tmp_path / f"a.{suffix}", exif=exif)
    ref = ImageFile(tmp_path / f"a.{suffix}")
    facts, loaded = read_facts(ref), load_rgb(ref)
    assert facts.size == loaded.size == ((20, 40) if orientation >= 5 else (40, 20))
    corners = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}
    x, y = corners[orientation]
    assert loaded.getpixel((2 if x == 0 else loaded.width - 3, 2 if y == 0 else loaded.height - 3))[0] < 60


def test_a_pipe_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(OSError, match="not a regular file"):
        ImageFile(tmp_path / "pipe.png").stamp()


def test_integers_beyond_16_bits_are_refused(tmp_path):
    Image.fromarray(np.array([[0, 70000]], dtype=np.int32)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="beyond 16 bits"):
        load_rgb(ImageFile(tmp_path / "a.tif"))
