"""The picture of noise levels is what training draws."""

from __future__ import annotations

import json

import numpy as np
import pytest

from qflux.config import TimestepSettings
from qflux.losses.distribution import ALL, BINS, level_curves
from qflux.losses.timesteps import NoiseLevels, NoiseShift
from qflux.report.curves import noise_charts
from qflux.runs.folder import RunFolder

SIZES = {256: 3.0, 4096: 1.0}
SETTINGS = [
    {},
    {"density": "logit_normal", "mean": 0.7, "std": 0.5},
    {"density": "mode", "mode_scale": 1.0},
    {"density": "uniform", "shift": "none"},
    {"density": "uniform", "shift": "fixed", "fixed_shift": 4.0},
    {"low": 0.3, "high": 0.7},
    {"density": "mode", "mode_scale": 1.0, "low": 0.5},
    {"density": "uniform", "shift": "none", "high": 0.25},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_curve_of_all_samples_is_the_histogram_of_draws(settings):
    levels = NoiseLevels(TimestepSettings(**settings), NoiseShift())
    drawn = [levels.draw(0, str(visit), visit, 256 if visit % 4 else 4096, 1)[0] for visit in range(6000)]
    found, _ = np.histogram(drawn, bins=BINS, range=(0, 1), density=True)
    curve = level_curves(levels, SIZES)[ALL]
    np.testing.assert_allclose([x for x, _ in curve], (np.arange(BINS) + 0.5) / BINS)
    wanted = np.array([y for _, y in curve])
    assert wanted.mean() == pytest.approx(1.0)
    # A bin of 120 draws varies by 10 %; added up, the two agree within what 6,000 draws can tell.
    assert np.abs(np.cumsum(found - wanted)).max() / BINS < 0.025


@pytest.mark.parametrize("settings", SETTINGS[-3:], ids=str)
def test_levels_between_two_bounds_are_those_of_the_whole_density_that_lie_there(settings):
    bounded = TimestepSettings(**settings)
    whole = NoiseLevels(bounded.model_copy(update={"low": 0.0, "high": 1.0}), NoiseShift())
    every = np.array([whole.draw(0, "a", visit, 1024, 1)[0] for visit in range(20000)])
    kept = every[(every >= bounded.low) & (every <= bounded.high)]
    drawn = np.array([NoiseLevels(bounded, NoiseShift()).draw(1, "a", visit, 1024, 1)[0] for visit in range(4000)])
    assert drawn.min() >= bounded.low
    assert drawn.max() <= bounded.high
    quantiles = np.linspace(0.02, 0.98, 25)
    width = bounded.high - bounded.low
    assert np.abs(np.quantile(drawn, quantiles) - np.quantile(kept, quantiles)).max() < 0.05 * width


def test_without_bounds_nothing_is_drawn_differently():
    first = NoiseLevels(TimestepSettings(), NoiseShift()).draw(3, "cat", 5, 64, 4)
    assert first[0] == pytest.approx(0.3585788294637456)
    assert NoiseLevels(TimestepSettings(low=0.01), NoiseShift()).draw(3, "cat", 5, 64, 4)[0] != first[0]


def test_bounds_with_nothing_between_them_are_refused():
    with pytest.raises(ValueError, match="no noise level between them"):
        TimestepSettings(low=0.6, high=0.5)


def test_sizes_are_told_apart_where_the_shift_goes_by_them():
    curves = level_curves(NoiseLevels(TimestepSettings(), NoiseShift()), SIZES)
    assert list(curves) == ["the smallest, 256 tokens", "the largest, 4,096 tokens", ALL]
    small, large, _ = (sum(x * y for x, y in curve) / BINS for curve in curves.values())
    assert small < large
    fixed = NoiseLevels(TimestepSettings(), NoiseShift(constant=3.0))
    assert list(level_curves(fixed, SIZES)) == [ALL]


def test_a_report_draws_what_a_run_wrote_and_leaves_out_what_is_damaged(tmp_path):
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("family: flux2\n")
        runs.append(RunFolder(tmp_path / name))
    curves = [{"name": "small", "points": [[0.1, 1.0]]}, {"name": ALL, "points": [[0.1, 1.0], [0.9, 2.0], ["x", 1]]}]
    runs[0].paths.noise_levels.write_text(json.dumps({"curves": [*curves, 7, {"name": "torn"}]}))
    runs[1].paths.noise_levels.write_text("[1, 2")
    (alone,) = noise_charts(runs[:1])
    assert "noise level" in str(alone)
    assert "small" in str(alone)
    assert "torn" not in str(alone)
    assert list(noise_charts(runs[1:])) == [None]
    (together,) = noise_charts(runs)
    assert "</i>a<" in str(together)
    assert "</i>b<" not in str(together)
