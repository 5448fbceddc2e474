"""Every measure against a truth made by hand: colours moved, blur of a known sigma, a change in a known rectangle."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from qflux.measures.colour import difference, lab
from qflux.measures.edit import EditMeasures, edited_region, means, measure
from qflux.measures.structure import WINDOW, blur, similarity

# Pairs of the published test data of CIEDE2000 (Sharma, Wu and Dalal 2005), which reach every branch of the formula.
PUBLISHED = [
    ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
    ((50.0, 3.1571, -77.2803), (50.0, 0.0, -82.7485), 2.8615),
    ((50.0, -1.3802, -84.2814), (50.0, 0.0, -82.7485), 1.0000),
    ((50.0, 0.0, 0.0), (50.0, -1.0, 2.0), 2.3669),
    ((50.0, 2.4900, -0.0010), (50.0, -2.4900, 0.0009), 7.1792),
    ((50.0, 2.4900, -0.0010), (50.0, -2.4900, 0.0011), 7.2195),
    ((50.0, -0.0010, 2.4900), (50.0, 0.0009, -2.4900), 4.8045),
    ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
    ((50.0, 2.5, 0.0), (61.0, -5.0, 29.0), 22.8977),
    ((50.0, 2.5, 0.0), (56.0, -27.0, -3.0), 31.9030),
    ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ((63.0109, -31.0961, -5.8663), (62.8187, -29.7946, -4.0864), 1.2630),
    ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619), 2.0373),
    ((90.8027, -2.0831, 1.4410), (91.1528, -1.6435, 0.0447), 1.4441),
    ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
]


@pytest.mark.parametrize(("first", "second", "expected"), PUBLISHED)
def test_colour_differences_are_the_published_ones_both_ways(first, second, expected):
    assert difference(np.array(first), np.array(second)) == pytest.approx(expected, abs=1e-4)
    assert difference(np.array(second), np.array(first)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ((255, 255, 255), (100, 0, 0)),
        ((0, 0, 0), (0, 0, 0)),
        ((255, 0, 0), (53.24, 80.09, 67.20)),
        ((0, 0, 255), (32.30, 79.19, -107.86)),
        ((119, 119, 119), (50.03, 0, 0)),
    ],
)
def test_known_colours_have_their_places_in_lab(colour, expected):
    assert lab(Image.new("RGB", (1, 1), colour))[0, 0] == pytest.approx(expected, abs=0.02)


def picture(seed: int = 0, size: tuple[int, int] = (192, 160)) -> Image.Image:
    """Shapes and texture, soft enough that 8 bits do not matter."""
    random = np.random.default_rng(seed)
    image = Image.new("RGB", size, (90, 120, 100))
    pen = ImageDraw.Draw(image)
    for _ in range(80):
        x, y, radius = int(random.integers(size[0])), int(random.integers(size[1])), int(random.integers(3, 30))
        colour = tuple(int(value) for value in random.integers(40, 215, 3))
        (pen.ellipse if random.random() < 0.5 else pen.rectangle)(
            (x - radius, y - radius, x + radius, y + radius), colour
        )
    return image


def test_similarity_is_what_a_walk_over_all_windows_finds():
    random = np.random.default_rng(0)
    first, second = (random.uniform(0, 255, (13, 11)) for _ in range(2))
    found = similarity(first, second)
    for row in range(13 - WINDOW + 1):
        for column in range(11 - WINDOW + 1):
            a, b = (each[row : row + WINDOW, column : column + WINDOW].ravel() for each in (first, second))
            c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
            covariance = np.cov(a, b)
            expected = (2 * a.mean() * b.mean() + c1) * (2 * covariance[0, 1] + c2)
            expected /= (a.mean() ** 2 + b.mean() ** 2 + c1) * (covariance[0, 0] + covariance[1, 1] + c2)
            assert found[row, column] == pytest.approx(expected, rel=1e-9)
    assert similarity(first, first) == pytest.approx(1.0)


def blurred(values: np.ndarray, sigma: float) -> np.ndarray:
    """By a Gaussian, exactly: in the frequency domain."""
    rows, columns = (np.fft.fftfreq(count) for count in values.shape)
    kernel = np.exp(-2 * np.pi**2 * sigma**2 * (rows[:, None] ** 2 + columns[None] ** 2))
    return np.fft.ifft2(np.fft.fft2(values) * kernel).real


@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_blur_is_found_to_a_tenth_of_a_pixel_and_its_opposite_too(sigma, seed):
    sharp = np.asarray(picture(seed).convert("L"), dtype=np.float64)
    soft = blurred(sharp, sigma)
    assert blur(soft, sharp) == pytest.approx(sigma, abs=0.1)
    assert blur(sharp, soft) == pytest.approx(-sigma, abs=0.1)
    assert blur(sharp, sharp) == pytest.approx(0, abs=1e-6)


def test_blur_of_what_is_flat_or_tiny_is_not_known():
    assert blur(np.zeros((64, 64)), np.zeros((64, 64))) is None
    assert blur(np.ones((8, 8)), np.ones((8, 8))) is None


BOX = (60, 40, 120, 100)


def edited(control: Image.Image) -> Image.Image:
    wanted = control.copy()
    ImageDraw.Draw(wanted).rectangle(BOX, fill=(250, 40, 30))
    return wanted


def in_box(image: Image.Image) -> np.ndarray:
    inside = np.zeros((image.height, image.width), dtype=bool)
    inside[BOX[1] : BOX[3] + 1, BOX[0] : BOX[2] + 1] = True
    return inside


@pytest.mark.parametrize("seed", range(4))
def test_the_region_is_found_from_what_changed(seed):
    control = picture(seed)
    region = edited_region(lab(control), lab(edited(control)), None)
    inside = in_box(control)
    assert region[inside].mean() > 0.95
    margin = np.asarray(Image.fromarray(inside.astype(np.uint8) * 255).filter(ImageFilter.MaxFilter(15))) > 0
    assert not region[~margin].any()


@pytest.mark.parametrize("with_mask", [False, True])
def test_an_edit_that_is_what_was_wanted_leaves_the_rest_alone_and_is_done(with_mask):
    control = picture()
    wanted = edited(control)
    mask = in_box(control).astype(np.float32) if with_mask else None
    found = measure(wanted, control, wanted, mask)
    assert found.outside_colour == pytest.approx(0, abs=1e-9)
    assert found.outside_ssim == pytest.approx(1)
    assert found.cast == pytest.approx(0, abs=1e-9)
    assert found.done == pytest.approx(1)
    assert found.blur == pytest.approx(0, abs=1e-6)
    nothing = measure(control, control, wanted, mask)
    assert nothing.done == pytest.approx(0)
    assert nothing.outside_colour == pytest.approx(0, abs=1e-9)


def test_a_cast_of_a_known_amount_is_found_where_it_should_not_be():
    """Everything becomes lighter and yellower by a known amount; the edit itself is not in question."""
    control = Image.new("RGB", (96, 96), (120, 120, 120))
    output = Image.new("RGB", (96, 96), (130, 128, 110))
    expected = lab(output)[0, 0] - lab(control)[0, 0]
    ImageDraw.Draw(output).rectangle((10, 10, 40, 40), fill=(0, 0, 255))
    mask = np.zeros((96, 96), dtype=np.float32)
    mask[10:41, 10:41] = 1
    found = measure(output, control, None, mask)
    assert found.cast_lab == pytest.approx(expected)
    assert found.cast == pytest.approx(np.linalg.norm(expected))
    assert found.outside_colour == pytest.approx(float(difference(lab(control)[0, 0], expected + lab(control)[0, 0])))
    assert found.done is None


def test_a_change_in_a_known_rectangle_outside_counts_by_its_area():
    control = Image.new("RGB", (100, 100), (120, 120, 120))
    output = control.copy()
    ImageDraw.Draw(output).rectangle((0, 90, 99, 99), fill=(160, 120, 120))  # a tenth of the image
    mask = np.zeros((10, 10), dtype=np.float32)
    mask[:5] = 1  # the upper half may change
    step = float(difference(lab(control)[0, 0], lab(output)[99, 0]))
    assert measure(output, control, None, mask).outside_colour == pytest.approx(step / 5)


def test_half_of_an_edit_is_half_done():
    control = Image.new("RGB", (64, 64), (100, 100, 100))
    wanted, output = control.copy(), control.copy()
    ImageDraw.Draw(wanted).rectangle((0, 0, 31, 31), fill=(200, 100, 100))
    ImageDraw.Draw(output).rectangle((0, 0, 31, 15), fill=(200, 100, 100))  # the upper half of it
    mask = np.zeros((2, 2), dtype=np.float32)
    mask[0, 0] = 1
    assert measure(output, control, wanted, mask).done == pytest.approx(0.5, abs=0.03)


def test_images_of_other_sizes_and_edits_of_everything_are_not_measured():
    control = picture()
    assert measure(control, control.resize((90, 90))) == EditMeasures()
    everywhere = measure(picture(1), control, picture(2), np.ones((4, 4), dtype=np.float32))
    assert everywhere.outside_colour is None
    assert everywhere.done is not None


def test_means_are_of_those_that_have_a_measure():
    found = means([EditMeasures(blur=1.0, done=0.5), EditMeasures(blur=2.0), EditMeasures()])
    assert (found["blur"], found["done"], found["cast"]) == (1.5, 0.5, None)
    assert EditMeasures(blur=1.23456, cast_lab=(1.0, 2.00001, 3.0)).line() == {"blur": 1.2346, "cast_lab": [1, 2, 3]}
