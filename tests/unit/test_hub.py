from __future__ import annotations

import io

import pytest
from PIL import Image

from qflux.config import HubColumns, HubSource
from qflux.data.images.decode import load_rgb, read_facts
from qflux.data.images.index import FileIndex
from qflux.data.sources import read_source
from qflux.errors import DataError

datasets = pytest.importorskip("datasets")


def png(size=(32, 16), colour="red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Four rows: two controls, one, none, and a mask."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    image = datasets.Image()
    return datasets.Dataset.from_dict(
        {
            "target_image": [{"bytes": png((32 + 16 * i, 16)), "path": None} for i in range(4)],
            "control_images": [[{"bytes": png(colour="blue"), "path": None}] * n for n in (2, 1, 0, 1)],
            "control_mask": [None, None, None, {"bytes": png(colour="white"), "path": None}],
            "prompt": ["one", " two ", "three", "four"],
        },
        features=datasets.Features(
            target_image=image, control_images=datasets.List(image), control_mask=image, prompt=datasets.Value("string")
        ),
    )


def source(path, **options) -> HubSource:
    return HubSource(type="huggingface", path=path, **options)


def save_parquet(table, tmp_path):
    table.to_parquet(str(tmp_path / "data/train.parquet"))
    return tmp_path / "data/train.parquet"


@pytest.mark.parametrize("form", ["parquet file", "parquet folder", "saved", "saved splits", "arrow"])
def test_every_local_form_gives_the_same_samples(table, tmp_path, form):
    (tmp_path / "data").mkdir()
    if form.startswith("parquet"):
        path = save_parquet(table, tmp_path)
        path = path.parent if form.endswith("folder") else path
    elif form == "saved splits":
        datasets.DatasetDict(train=table).save_to_disk(str(tmp_path / "saved"))
        path = tmp_path / "saved"
    else:
        table.save_to_disk(str(tmp_path / "saved"))
        path = tmp_path / "saved" if form == "saved" else next((tmp_path / "saved").glob("*.arrow"))
    listing = read_source(source(path, repeats=2))
    assert [example.prompt for example in listing.samples] == ["one", "two", "three", "four"]
    assert [len(example.controls) for example in listing.samples] == [2, 1, 0, 1]
    assert [example.mask is not None for example in listing.samples] == [False, False, False, True]
    assert {example.rate for example in listing.samples} == {2.0}
    assert [read_facts(example.target).size for example in listing.samples] == [(32, 16), (48, 16), (64, 16), (80, 16)]
    assert load_rgb(listing.samples[0].controls[1]).getpixel((0, 0)) == (0, 0, 255)
    assert not listing.faults


def test_facts_of_cells_are_kept_while_the_files_stay(table, tmp_path):
    table.save_to_disk(str(tmp_path / "saved"))

    def read() -> int:
        listing = read_source(source(tmp_path / "saved"))
        index = FileIndex(tmp_path / "index.jsonl")
        index.facts([image for example in listing.samples for image in example.images])
        return index.read

    assert read() == 8
    assert read() == 0


def test_other_columns_and_a_single_control_image(tmp_path):
    (tmp_path / "data").mkdir()
    image = datasets.Image()
    table = datasets.Dataset.from_dict(
        {"after": [{"bytes": png(), "path": None}], "before": [{"bytes": png(), "path": None}], "text": ["x"]},
        features=datasets.Features(after=image, before=image, text=datasets.Value("string")),
    )
    columns = HubColumns(target="after", controls="before", prompt="text")
    (example,) = read_source(source(save_parquet(table, tmp_path), columns=columns)).samples
    assert len(example.controls) == 1
    assert str(example.controls[0]).endswith("train.parquet row 0, before")


def test_paths_in_a_table_are_files_beside_it(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(png())
    table = datasets.Dataset.from_dict({"target_image": ["a.png"], "prompt": ["x"]})
    (example,) = read_source(source(save_parquet(table, tmp_path))).samples
    assert read_facts(example.target).size == (32, 16)


def test_bad_rows_are_named_and_the_others_stay(tmp_path):
    (tmp_path / "data").mkdir()
    table = datasets.Dataset.from_dict(
        {
            "target_image": [None, png(), png(), png()],
            "control_images": [[png()], [png(), None], [png()], [b"no image"]],
            "prompt": ["no target", "gap", "  ", "fine until it is read"],
        }
    )
    listing = read_source(source(save_parquet(table, tmp_path)))
    problems = [str(fault) for fault in listing.faults]
    assert len(problems) == 3
    assert "train.parquet[train][0]: 0 target images" in problems[0]
    assert "train.parquet[train][1]: control_images has a gap" in problems[1]
    assert "train.parquet[train][2]: prompt is empty" in problems[2]
    (broken,) = FileIndex(tmp_path / "index").facts(listing.samples[0].controls)
    assert isinstance(broken, DataError)
    assert "row 3, control_images 0 can't be read as an image" in str(broken)


def test_missing_columns_and_data_sets_are_errors_with_a_hint(table, tmp_path):
    (tmp_path / "data").mkdir()
    path = save_parquet(table, tmp_path)
    with pytest.raises(DataError, match=r"no column 'prompts'\n.*did you mean 'prompt'"):
        read_source(source(path, columns=HubColumns(prompt="prompts")))
    with pytest.raises(DataError, match=r"nobody/nothing.*can't be read"):
        read_source(source("nobody/nothing"))


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'qflux\[datasets\]'"):
        read_source(source(tmp_path))


def test_a_folder_of_parquet_files_keeps_its_splits(table, tmp_path):
    (tmp_path / "data").mkdir()
    table.select([0, 1]).to_parquet(str(tmp_path / "data/train-00000-of-00002.parquet"))
    table.select([2]).to_parquet(str(tmp_path / "data/train-00001-of-00002.parquet"))
    table.select([3]).to_parquet(str(tmp_path / "data/test-00000-of-00001.parquet"))
    for split, prompts in (("train", ["one", "two", "three"]), ("test", ["four"])):
        listing = read_source(source(tmp_path / "data", split=split))
        assert [example.prompt for example in listing.samples] == prompts
        assert read_facts(listing.samples[0].target).width == (32 if split == "train" else 80)


def test_lists_of_fixed_length_are_lists(tmp_path):
    (tmp_path / "data").mkdir()
    image = {"bytes": png(), "path": None}
    table = datasets.Dataset.from_dict(
        {"target_image": [image], "control_images": [[image, image]], "prompt": ["x"]},
        features=datasets.Features(
            target_image=datasets.Image(),
            control_images=datasets.List(datasets.Image(), length=2),
            prompt=datasets.Value("string"),
        ),
    )
    (example,) = read_source(source(save_parquet(table, tmp_path))).samples
    assert [read_facts(image).size for image in example.controls] == [(32, 16)] * 2


def test_columns_of_the_wrong_kind_are_errors(tmp_path):
    (tmp_path / "data").mkdir()
    table = datasets.Dataset.from_dict({"target_image": [png()], "prompt": [[1, 2]]})
    with pytest.raises(DataError, match="not text"):
        read_source(source(save_parquet(table, tmp_path)))
    table = datasets.Dataset.from_dict({"target_image": [3], "prompt": ["a"]})
    with pytest.raises(DataError, match="holds no images"):
        read_source(source(save_parquet(table, tmp_path)))
