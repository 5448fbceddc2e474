"""Colours as people see them: CIE Lab, and the difference CIEDE2000 between two of them (1 is just visible)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]

_TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])
_KNEE = 6 / 29


def lab(image: Image.Image) -> Floats:
    """`(rows, columns, 3)`: lightness 0 to 100, green to red, blue to yellow, of an sRGB image under D65."""
    coded = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    relative = linear @ _TO_XYZ.T / _WHITE
    curved = np.where(relative > _KNEE**3, np.cbrt(relative), relative / (3 * _KNEE**2) + 4 / 29)
    x, y, z = np.moveaxis(curved, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def difference(first: Floats, second: Floats) -> Floats:
    """CIEDE2000 between colours in Lab, `(…, 3)` each; the formula of Sharma, Wu and Dalal (2005)."""
    (light_1, a_1, b_1), (light_2, a_2, b_2) = (np.moveaxis(each, -1, 0) for each in (first, second))
    chroma = (np.hypot(a_1, b_1) + np.hypot(a_2, b_2)) / 2
    widen = 1.5 - 0.5 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    chroma_1, chroma_2 = np.hypot(widen * a_1, b_1), np.hypot(widen * a_2, b_2)
    hue_1, hue_2 = (np.degrees(np.arctan2(b, widen * a)) % 360 for a, b in ((a_1, b_1), (a_2, b_2)))

    is_grey = chroma_1 * chroma_2 == 0
    turn = hue_2 - hue_1
    turn = np.where(turn > 180, turn - 360, np.where(turn < -180, turn + 360, turn))
    turn = np.where(is_grey, 0.0, turn)
    by_hue = 2 * np.sqrt(chroma_1 * chroma_2) * np.sin(np.radians(turn) / 2)
    by_light, by_chroma = light_2 - light_1, chroma_2 - chroma_1

    light, chroma = (light_1 + light_2) / 2, (chroma_1 + chroma_2) / 2
    total = hue_1 + hue_2
    far = np.abs(hue_1 - hue_2) > 180
    hue = np.where(is_grey, total, np.where(far, (total + np.where(total < 360, 360, -360)) / 2, total / 2))
    weight = (
        1
        - 0.17 * np.cos(np.radians(hue - 30))
        + 0.24 * np.cos(np.radians(2 * hue))
        + 0.32 * np.cos(np.radians(3 * hue + 6))
        - 0.20 * np.cos(np.radians(4 * hue - 63))
    )
    scale_light = 1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2)
    scale_chroma, scale_hue = 1 + 0.045 * chroma, 1 + 0.015 * chroma * weight
    bend = 30 * np.exp(-(((hue - 275) / 25) ** 2))
    twist = -np.sin(np.radians(2 * bend)) * 2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    light_part, chroma_part, hue_part = by_light / scale_light, by_chroma / scale_chroma, by_hue / scale_hue
    squared = light_part**2 + chroma_part**2 + hue_part**2 + twist * chroma_part * hue_part
    return np.asarray(np.sqrt(np.maximum(squared, 0)), dtype=np.float64)
