from __future__ import annotations

import contextlib
import json

import pytest
from PIL import Image

from qflux.data.images.decode import ImageFacts, ImageFile, load_rgb, read_facts
from qflux.data.images.index import FileIndex, in_parallel
from qflux.errors import DataError


@pytest.fixture
def images(tmp_path):
    files = []
    for number in range(5):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (10 + number, 20), (number, 0, 0)).save(path)
        files.append(ImageFile(path))
    return files


def test_a_second_run_reads_nothing_and_says_the_same(tmp_path, images):
    first, second = FileIndex(tmp_path / "index.jsonl"), FileIndex(tmp_path / "index.jsonl")
    facts = first.facts(images)
    assert facts == [read_facts(image) for image in images]
    assert [f.size for f in facts] == [(10 + i, 20) for i in range(5)]
    assert second.facts(images) == facts
    assert (first.read, second.read) == (5, 0)


def test_only_what_changed_is_read_again(tmp_path, images):
    FileIndex(tmp_path / "index.jsonl").facts(images)
    Image.new("RGB", (99, 20)).save(images[2].path)
    index = FileIndex(tmp_path / "index.jsonl")
    assert index.facts(images)[2].size == (99, 20)
    assert index.read == 1


def test_headers_tell_orientation_depth_and_mode_without_decoding(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 10)).save(tmp_path / "turned.jpg", exif=exif)
    Image.new("I;16", (8, 8)).save(tmp_path / "deep.png")
    Image.new("CMYK", (8, 8)).save(tmp_path / "print.jpg")
    turned, deep, cmyk = FileIndex(tmp_path / "i").facts(
        [ImageFile(tmp_path / name) for name in ("turned.jpg", "deep.png", "print.jpg")]
    )
    assert (turned.size, turned.orientation) == ((10, 30), 6)
    assert (deep.deep, turned.deep) == (True, False)
    assert cmyk.mode == "CMYK"


def test_what_cannot_be_read_is_an_error_of_its_own_and_tried_again(tmp_path, images):
    (tmp_path / "bad.png").write_bytes(b"no image")
    files = [images[0], ImageFile(tmp_path / "bad.png"), ImageFile(tmp_path / "absent.png")]
    good, bad, absent = FileIndex(tmp_path / "index.jsonl").facts(files)
    assert isinstance(good, ImageFacts)
    assert isinstance(bad, DataError)
    assert "bad.png can't be read as an image: its format is not known" in str(bad)
    assert "absent.png can't be read as an image: No such file" in str(absent)
    Image.new("RGB", (7, 7)).save(tmp_path / "bad.png")
    assert FileIndex(tmp_path / "index.jsonl").facts(files)[1].size == (7, 7)


def test_a_torn_or_foreign_line_costs_one_image_not_the_index(tmp_path, images):
    path = tmp_path / "index.jsonl"
    FileIndex(path).facts(images)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["[1", "{}", '[["x"], {"width": 1}]', *lines[:-1], lines[-1][:30]]))
    index = FileIndex(path)
    index.facts(images)
    assert index.read == 1
    again = FileIndex(path)
    again.facts(images)
    assert again.read == 0, "a line appended after a torn one is not lost with it"


def test_an_index_of_outdated_lines_is_written_anew(tmp_path, images):
    path = tmp_path / "index.jsonl"
    FileIndex(path).facts(images)
    path.write_text(path.read_text() * 600)
    index = FileIndex(path)
    index.facts(images)
    assert index.read == 0
    assert len(path.read_text().splitlines()) == 5


def test_an_index_where_no_file_can_be_is_no_obstacle(tmp_path, images, caplog):
    (tmp_path / "file").write_text("")
    assert len(FileIndex(tmp_path / "file/index.jsonl").facts(images)) == 5
    assert "images are read again" in caplog.text


def test_hashes_of_other_files_are_remembered_too(tmp_path):
    (tmp_path / "weights").write_bytes(b"abc")
    index = FileIndex(tmp_path / "index.jsonl")
    digest = index.hash_of(tmp_path / "weights")
    index.save()
    again = FileIndex(tmp_path / "index.jsonl")
    assert again.hash_of(tmp_path / "weights") == digest
    assert again.read == 0
    assert json.loads(path_lines(tmp_path)[0])[1] == digest


def path_lines(folder) -> list[str]:
    return [line for line in (folder / "index.jsonl").read_text().splitlines() if line]


def test_parallel_work_keeps_the_order_of_any_number_of_items():
    assert list(in_parallel(lambda x: x * x, range(4500))) == [x * x for x in range(4500)]


def test_damaged_metadata_and_impossible_paths_are_errors_of_their_own(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 10)).save(tmp_path / "a.jpg", exif=exif)
    data = bytearray((tmp_path / "a.jpg").read_bytes())
    for place in range(20, 60):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        (tmp_path / "b.jpg").write_bytes(changed)
        for found in FileIndex(tmp_path / "i").facts([ImageFile(tmp_path / "b.jpg"), ImageFile(tmp_path / "x\0y")]):
            assert isinstance(found, ImageFacts | DataError)
        with contextlib.suppress(DataError):
            load_rgb(ImageFile(tmp_path / "b.jpg"))


@pytest.mark.parametrize("kind", ["Raw profile type exif", "XML:com.adobe.xmp"])
def test_orientation_hidden_in_png_text_is_seen(tmp_path, kind):
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    exif = Image.Exif()
    exif[0x0112] = 6
    if kind.startswith("Raw"):
        raw = b"Exif\0\0" + exif.tobytes().removeprefix(b"Exif\0\0")
        info.add_text(kind, f"\nexif\n{len(raw):8}\n{raw.hex()}\n", zip=True)
    else:
        info.add_itxt(kind, '<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>')
    Image.new("RGB", (30, 10)).save(tmp_path / "a.png", pnginfo=info)
    image = ImageFile(tmp_path / "a.png")
    assert read_facts(image).size == load_rgb(image).size == (10, 30)
