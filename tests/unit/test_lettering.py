"""Names and prompts can be read in pictures, in whatever script they are."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from qflux.pictures import lettering
from qflux.pictures.drawing import GridRow, edit_grid
from qflux.pictures.lettering import draw_text, fitting, font, text_width


def drawn(text: str, anchor: str = "la", place: tuple[float, float] = (4, 4)) -> np.ndarray:
    canvas = Image.new("L", (420, 40), 255)
    draw_text(ImageDraw.Draw(canvas), place, text, 0, 14, anchor)
    return np.asarray(canvas)


SCRIPTS = {
    "Chinese": "把白天变成夜晚",
    "traditional Chinese": "將白天變成夜晚",
    "Japanese": "夜にしてください",
    "Korean": "밤으로 바꿔",
    "Cyrillic": "сделай ночь",
    "Greek": "κάνε νύχτα",
    "Hebrew": "לילה",
    "Arabic": "اجعلها ليلا",
    "Vietnamese": "biến ngày thành đêm",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_letter_is_drawn_and_none_is_an_empty_box(script, monkeypatch):
    monkeypatch.setattr(lettering, "_of_the_machine", tuple)
    lettering._source_of.cache_clear()
    letters = {letter for letter in SCRIPTS[script] if not letter.isspace()}
    pictures = {letter: drawn(letter).tobytes() for letter in letters}
    assert len(set(pictures.values())) == len(letters), "each letter looks different"
    missing = drawn(chr(0x10FFFF)).tobytes()
    assert missing not in pictures.values()


def test_latin_text_looks_as_it_always_did():
    canvas = Image.new("L", (420, 40), 255)
    ImageDraw.Draw(canvas).text((4, 4), "make it snow", 0, font(14))
    assert np.array_equal(drawn("make it snow"), np.asarray(canvas))


@pytest.mark.parametrize("text", ["make it snow", "下雪 snow ночь"])
def test_anchors_and_widths_agree(text):
    width = text_width(text, 14)
    middle, right = drawn(text, "ma", (210, 4)), drawn(text, "ra", (400, 4))
    columns = [np.flatnonzero((picture < 128).any(0)) for picture in (middle, right)]
    assert abs((columns[0][0] + columns[0][-1]) / 2 - 210) < 4
    assert columns[1][-1] <= 400
    assert columns[1][0] >= 400 - width - 2
    short = fitting(text * 9, 14, 100)
    assert short.endswith("…")
    assert text_width(short, 14) <= 100 < text_width(text * 9, 14)
    assert fitting(text, 14, width) == text


def test_a_sheet_shows_chinese_captions():
    image = Image.new("RGB", (300, 60))
    chinese, boxes = (
        edit_grid([GridRow(caption, {"输出": image})], ["输出"])
        for caption in ("夜晚.png: 变成夜晚", chr(0x10FFFF) * 9)
    )
    assert not np.array_equal(chinese, boxes)
