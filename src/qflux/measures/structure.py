"""Structure: how alike two grey images are from place to place (SSIM), and how much blurrier one is than the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WINDOW = 7
"""Side of the squares that are compared."""
_STABLE = (0.01 * 255) ** 2, (0.03 * 255) ** 2
_BAND = (0.03, 0.25)
"""Frequencies, in cycles a pixel, that blur is measured at: below is composition, above is noise."""
_LEAST_SIDE = 32


def similarity(first: Floats, second: Floats, where: NDArray[np.bool_] | None = None) -> Floats:
    """SSIM of two images `(rows, columns)` with values 0 to 255, of each window that lies inside; 1 if they are alike.

    Windows are uniform, variances those of samples. `(rows - 6, columns - 6)`; with `where`, a list of those windows
    that lie in that region as a whole.
    """
    if min(first.shape) < WINDOW:
        return np.zeros(0)
    count = WINDOW**2
    mean_1, mean_2 = _means(first), _means(second)
    sample = count / (count - 1)
    variance_1 = sample * (_means(first * first) - mean_1**2)
    variance_2 = sample * (_means(second * second) - mean_2**2)
    covariance = sample * (_means(first * second) - mean_1 * mean_2)
    light = (2 * mean_1 * mean_2 + _STABLE[0]) / (mean_1**2 + mean_2**2 + _STABLE[0])
    found = np.asarray(light * (2 * covariance + _STABLE[1]) / (variance_1 + variance_2 + _STABLE[1]))
    return found if where is None else found[_means(where.astype(np.float64)) > 1 - 0.5 / count]


def _means(values: Floats) -> Floats:
    """Of all windows, by sums over rectangles."""
    sums = np.pad(values, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    inside = sums[WINDOW:, WINDOW:] - sums[:-WINDOW, WINDOW:] - sums[WINDOW:, :-WINDOW] + sums[:-WINDOW, :-WINDOW]
    return np.asarray(inside / WINDOW**2, dtype=np.float64)


def blur(image: Floats, reference: Floats) -> float | None:
    """The sigma, in pixels, of the Gaussian that would blur `reference` as `image` is; negative if that is sharper.

    A Gaussian takes `exp(-4 pi² sigma² f²)` of the power at frequency f: the logarithm of the ratio of two spectra is a
    line over f², whatever else differs between the images evenly. None if there is too little to compare.
    """
    if min(image.shape) < _LEAST_SIDE or image.shape != reference.shape:
        return None
    squared, powers = _spectrum(image), _spectrum(reference)
    frequencies, of_image, of_reference = squared[0], squared[1], powers[1]
    known = (of_image > 0) & (of_reference > 0)
    if known.sum() < 3:
        return None
    slope = np.polyfit(frequencies[known] ** 2, np.log(of_image[known] / of_reference[known]), 1)[0]
    variance = -slope / (4 * np.pi**2)
    return float(np.sign(variance) * np.sqrt(abs(variance)))


def _spectrum(values: Floats) -> tuple[Floats, Floats]:
    """Mean power of rings of like frequency within the band; without what the borders add."""
    rows, columns = values.shape
    window = np.outer(np.hanning(rows), np.hanning(columns))
    power = np.abs(np.fft.rfft2((values - values.mean()) * window)) ** 2
    distance = np.hypot(np.fft.fftfreq(rows)[:, None], np.fft.rfftfreq(columns)[None])
    edges = np.linspace(*_BAND, 24)
    ring = np.digitize(distance, edges)
    totals, counts = (np.bincount(ring.ravel(), weights, len(edges) + 1)[1:-1] for weights in (power.ravel(), None))
    return (edges[1:] + edges[:-1]) / 2, totals / np.maximum(counts, 1)
