from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from qflux.config import Candidates, ProcessorSettings
from qflux.data.images.sizes import ImageProcessor, Transform, best_size, size_for_area
from qflux.errors import DataError
from qflux.models.flux_kontext.facts import KONTEXT_SIZES

sides = st.integers(16, 6000)
areas = st.integers(512 * 512, 1536 * 1536)


@settings(max_examples=300, deadline=None)
@given(area=areas, width=sides, height=sides)
def test_a_size_keeps_budget_and_aspect_ratio(area, width, height):
    if max(width / height, height / width) > 3:
        return
    size = size_for_area(area, width, height)
    assert all(side % 16 == 0 for side in size)
    rows, columns = (side // 16 for side in size)
    budget = area // 256
    assert rows * columns <= budget
    assert rows * columns >= 0.9 * budget
    assert abs((columns / rows) / (width / height) - 1) <= 0.03
    # Less than one step is cropped, on one axis only.
    assert abs(columns - rows * width / height) < 1 or abs(rows - columns * height / width) < 1


@settings(max_examples=200, deadline=None)
@given(area=st.integers(256, 128 * 128), width=st.integers(1, 500), height=st.integers(1, 500))
def test_small_budgets_are_never_exceeded(area, width, height):
    height_out, width_out = size_for_area(area, width, height)
    assert height_out % 16 == width_out % 16 == 0
    assert 1 <= height_out * width_out // 256 <= max(1, area // 256)


def test_the_nearest_area_is_chosen_relative_to_the_image():
    assert best_size([512 * 512, 1024 * 1024], 600, 600) == (512, 512)
    assert best_size([512 * 512, 1024 * 1024], 900, 900) == (1024, 1024)


def test_on_a_tie_the_smaller_area_is_chosen():
    # 100 x 1024 pixels lies exactly between the two areas.
    assert best_size([307200, 102400], 320, 640) == size_for_area(102400, 320, 640)


def test_the_processor_follows_target_size_then_candidates_then_pixels():
    everything = {
        "target_size": (256, 512),
        "multi_resolutions": Candidates(target=[128 * 128]),
        "target_pixels": 64 * 64,
    }
    assert ImageProcessor(ProcessorSettings(**everything)).target(100, 100).size == (256, 512)
    del everything["target_size"]
    assert ImageProcessor(ProcessorSettings(**everything)).target(100, 100).size == (128, 128)
    del everything["multi_resolutions"]
    assert ImageProcessor(ProcessorSettings(**everything)).target(100, 100).size == (64, 64)


def test_controls_have_their_own_candidates_where_given_and_the_first_entry_is_the_first_control():
    candidates = Candidates(target=[256 * 256], controls=[[64 * 64, 128 * 128]])
    processor = ImageProcessor(ProcessorSettings(multi_resolutions=candidates))
    assert processor.control(0, 120, 120).size == (128, 128)
    assert processor.control(1, 120, 120).size == (256, 256)
    sized = ImageProcessor(ProcessorSettings(controls_size=[(32, 48)], controls_pixels=64 * 64))
    assert sized.control(0, 500, 500, sized.target(500, 500)).size == (32, 48)
    assert sized.control(1, 500, 500).size == (64, 64)


SHARED = [
    {},
    {"target_size": (64, 96), "controls_size": [(64, 96), (32, 32)]},
    {"target_pixels": 96 * 96, "controls_pixels": [96 * 96, 32 * 32]},
    {"target_pixels": 96 * 96, "controls_pixels": 96 * 96},
    {"multi_resolutions": Candidates(target=[64 * 64, 96 * 96], controls=[[64 * 64, 96 * 96], [32 * 32]])},
    {"multi_resolutions": Candidates(preset="kontext"), "controls_size": None},
]


@pytest.mark.parametrize("settings", SHARED, ids=str)
def test_the_first_control_shares_the_targets_transform_unless_another_size_is_configured(settings):
    """A control of another aspect ratio than its target is cut as the target is."""
    processor = ImageProcessor(ProcessorSettings(**settings))
    target = processor.target(150, 100)
    assert processor.control(0, 100, 150, target) == target
    own = ImageProcessor(
        ProcessorSettings(**settings, **({} if "controls_size" in settings else {"controls_size": [(48, 80)]}))
    )
    if "controls_size" not in settings:
        assert own.control(0, 100, 150, own.target(150, 100)).size == (48, 80)


def test_the_kontext_preset_is_the_pipelines_list():
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    assert [(w, h) for h, w in KONTEXT_SIZES] == PREFERRED_KONTEXT_RESOLUTIONS
    processor = ImageProcessor(ProcessorSettings(multi_resolutions=Candidates(preset="kontext")))
    for width, height in ((640, 480), (1000, 1000), (300, 640), (1600, 700)):
        _, w, h = min((abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        assert processor.target(width, height).size == (h, w)


def test_an_image_beyond_the_aspect_limit_is_named():
    with pytest.raises(DataError, match=r"banner\.png is 400x100.*max_aspect_ratio 3"):
        ImageProcessor().target(400, 100, "banner.png")


def gradient(width: int, height: int) -> Image.Image:
    """Red grows from left to right, green from top to bottom: a crop or a squeeze shows in the corners."""
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(np.stack([x, y, np.zeros_like(x)], -1).round().astype(np.uint8))


def test_an_image_of_its_size_is_left_alone():
    image = gradient(64, 32)
    assert Transform((32, 64), "crop")(image) is image


def test_cropping_takes_the_same_from_both_sides_and_squeezes_nothing():
    pixels = np.asarray(Transform((64, 64), "crop")(gradient(128, 64))).astype(int)
    assert pixels.shape == (64, 64, 3)
    assert abs(pixels[0, 0, 0] - 64) < 6
    assert abs(pixels[0, -1, 0] - 191) < 6
    assert pixels[0, 0, 1] < 6
    assert pixels[-1, 0, 1] > 249


def test_resize_stretches_and_padding_adds_white():
    stretched = np.asarray(Transform((64, 64), "stretch")(gradient(128, 64)))
    assert stretched[0, 0, 0] < 6
    assert stretched[0, -1, 0] > 249
    padded = np.asarray(Transform((64, 64), "pad")(gradient(128, 64)))
    assert (padded[:16] == 255).all()
    assert (padded[-16:] == 255).all()
    assert padded[17, 1, 0] < 10


@settings(max_examples=40, deadline=None)
@given(width=st.integers(20, 300), height=st.integers(20, 300))
def test_target_mask_and_first_control_get_the_same_pixels(width, height):
    if max(width / height, height / width) > 3:
        return
    transform = ImageProcessor(ProcessorSettings(target_pixels=96 * 96)).target(width, height)
    target = gradient(width, height)
    red, _, _ = target.split()
    as_mask = np.asarray(transform(red, fill="black")).astype(int)
    as_image = np.asarray(transform(target))[..., 0].astype(int)
    assert np.abs(as_mask - as_image).max() <= 1


@settings(max_examples=200, deadline=None)
@given(candidates=st.lists(areas, min_size=1, max_size=6, unique=True), width=sides, height=sides)
def test_the_candidate_nearest_to_the_image_is_taken(candidates, width, height):
    if max(width / height, height / width) > 3:
        return
    own = width * height
    errors = sorted((abs(a - own) / own, a) for a in candidates)
    assert best_size(candidates, width, height) == size_for_area(errors[0][1], width, height)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(96, 700),
    height=st.integers(96, 700),
    scale=st.floats(0.5, 2.0),
    x=st.floats(0.2, 0.8),
    y=st.floats(0.2, 0.8),
    fit=st.sampled_from(["crop", "stretch", "pad"]),
)
def test_a_marked_point_lands_on_the_same_token_in_target_mask_and_first_control(width, height, scale, x, y, fit):
    """The control may be of another resolution; the mask is of the target's."""
    if max(width / height, height / width) > 3:
        return
    process = {"crop": "fixed_pixels", "stretch": "resize", "pad": "padding"}[fit]
    processor = ImageProcessor(ProcessorSettings(process_type=process, target_pixels=256 * 256))
    transform = processor.target(width, height)
    control_size = round(width * scale), round(height * scale)

    def place(size: tuple[int, int], mode: str) -> np.ndarray:
        """Where the mark is after the transform, in tokens."""
        image = np.zeros((size[1], size[0]), np.float32)
        radius = max(2, round(min(size) * 0.03))
        cx, cy = x * size[0], y * size[1]
        rows, columns = np.ogrid[: size[1], : size[0]]
        image[(columns + 0.5 - cx) ** 2 + (rows + 0.5 - cy) ** 2 <= radius**2] = 255
        moved = np.asarray(transform(Image.fromarray(image.astype(np.uint8)).convert(mode), fill="black").convert("L"))
        weights = moved.astype(float) * (moved > 40)
        return np.array([(weights.sum(1 - axis) @ (np.arange(moved.shape[axis]) + 0.5)) for axis in (0, 1)]) / (
            weights.sum() * 16
        )

    target, mask, control = place((width, height), "RGB"), place((width, height), "L"), place(control_size, "RGB")
    # Two images can't agree better than a pixel of the coarser one; a token is sixteen.
    tolerance = (1.0 + max(1.0, 1 / scale)) * max(transform.size[0] / height, 1.0) / 16
    assert np.abs(target - mask).max() < 0.01
    assert np.abs(target - control).max() < tolerance


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(17, 900),
    height=st.integers(17, 900),
    candidates=st.lists(st.integers(64 * 64, 1024 * 1024), min_size=1, max_size=4),
    process=st.sampled_from(["fixed_pixels", "resize", "padding"]),
)
def test_nothing_is_enlarged_unless_asked_for(width, height, candidates, process):
    """A small image keeps its own pixels, less than a step is lost; a large one is sized as ever."""
    if max(width / height, height / width) > 3:
        return
    common = {"process_type": process, "multi_resolutions": Candidates(target=candidates)}
    asked = ImageProcessor(ProcessorSettings(**common)).target(width, height)
    kept = ImageProcessor(ProcessorSettings(**common, enlarge=False)).target(width, height)
    if not asked.enlarges(width, height):
        assert kept == asked
        return
    assert kept.size == (height // 16 * 16, width // 16 * 16)
    assert kept.size[0] * kept.size[1] <= asked.size[0] * asked.size[1]
    if process == "fixed_pixels":
        image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        left, top = (width % 16) // 2, (height % 16) // 2
        cut = image[top : top + kept.size[0], left : left + kept.size[1]]
        assert np.array_equal(np.asarray(kept(Image.fromarray(image))), cut)


def test_a_control_of_another_resolution_is_cut_as_its_small_target_is():
    processor = ImageProcessor(ProcessorSettings(target_pixels=1024 * 1024, enlarge=False))
    target = processor.target(310, 250)
    twice = processor.control(0, 620, 500, target)
    other = processor.control(0, 400, 700, target)
    assert target.size == twice.size == other.size == (240, 304)
    assert twice.box(620, 500) == tuple(2 * side for side in target.box(310, 250))
    left, top, right, bottom = other.box(400, 700)
    assert (right - left) / (bottom - top) == pytest.approx(304 / 240, rel=1e-3)  # covered, not squeezed
    assert other.crops(400, 700)
    assert not target.crops(310, 250)


def test_one_size_for_all_contradicts_no_enlarging():
    with pytest.raises(ValueError, match="leave enlarge: false out"):
        ProcessorSettings(target_size=(64, 64), enlarge=False)


@pytest.mark.parametrize("enlarge", [True, False])
def test_a_control_of_its_own_keeps_size_and_aspect_ratio(enlarge):
    common = {"multi_resolutions": Candidates(target=[96 * 96, 192 * 192]), "enlarge": enlarge}
    processor = ImageProcessor(ProcessorSettings(**common, controls="own"))
    target = processor.target(260, 130)
    square = processor.control(0, 200, 200, target)
    assert square == processor.target(200, 200)
    assert square.size[0] == square.size[1]
    shared = ImageProcessor(ProcessorSettings(**common)).control(0, 200, 200, target)
    assert shared.size == target.size
    assert shared.crops(200, 200)
