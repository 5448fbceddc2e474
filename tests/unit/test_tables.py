from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from qflux.config import CsvSource, JsonlSource, TableColumns
from qflux.data.sources import read_source
from qflux.errors import DataError

HEADER = "path_target,path_control,path_control_1,prompt,path_mask\n"


def csv_source(folder, text: str, **options) -> CsvSource:
    (folder / "table.csv").write_text(text, encoding="utf-8")
    return CsvSource(type="csv", path=folder / "table.csv", **options)


def jsonl_source(folder, *rows, **options) -> JsonlSource:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "table.jsonl").write_text("\n".join(lines))
    return JsonlSource(type="jsonl", path=folder / "table.jsonl", **options)


def test_a_csv_row_is_a_sample_with_paths_relative_to_the_file(tmp_path):
    listing = read_source(csv_source(tmp_path, HEADER + 't.png,c.png,d.png,"red, please",m.png\n/abs/t.png,,,plain,\n'))
    first, second = listing.samples
    assert (first.name, first.prompt) == ("t.png", "red, please")
    assert first.place == f"{tmp_path.name}/table.csv:2"
    assert [image.path for image in first.images] == [tmp_path / name for name in ("t.png", "c.png", "d.png")]
    assert first.mask.path == tmp_path / "m.png"
    assert (str(second.target.path), second.controls, second.mask) == ("/abs/t.png", (), None)
    assert not listing.faults


def test_jsonl_has_the_same_fields(tmp_path):
    row = {"path_target": "t.png", "path_control": "c.png", "path_control_1": "d.png", "prompt": "x", "path_mask": None}
    (example,) = read_source(jsonl_source(tmp_path, row, "")).samples
    assert [image.path.name for image in example.images] == ["t.png", "c.png", "d.png"]
    assert (example.name, example.mask) == ("t.png", None)


def test_columns_and_root_can_be_mapped(tmp_path):
    columns = TableColumns(target="after", control="before", prompt="caption", mask="where")
    text = "after,before,before_1,before_2,caption,where,extra\nt,b,b1,b2,hello,w,9\n"
    (example,) = read_source(csv_source(tmp_path, text, columns=columns, root=tmp_path / "images")).samples
    assert [image.path.name for image in example.controls] == ["b", "b1", "b2"]
    assert example.mask.path == tmp_path / "images/w"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (",c,,p,", "path_target is empty"),
        ("t,c,, ,", "prompt is empty"),
        ("t,,d,p,", "path_control is empty, but path_control_1 is not"),
    ],
)
def test_a_bad_row_is_named_and_the_others_stay(tmp_path, row, problem):
    listing = read_source(csv_source(tmp_path, f"{HEADER}{row}\ngood,,,prompt,\n"))
    assert [str(fault) for fault in listing.faults] == [f"{tmp_path.name}/table.csv:2: {problem}"]
    assert len(listing.samples) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a list, not an object"),
        ('{"path_target": 3, "prompt": "x"}', "path_target is 3, not text"),
    ],
)
def test_a_bad_json_line_is_named_and_the_others_stay(tmp_path, line, problem):
    listing = read_source(jsonl_source(tmp_path, {"path_target": "t", "prompt": "p"}, line))
    assert str(listing.faults[0]).startswith(f"{tmp_path.name}/table.jsonl:2: {problem}")
    assert len(listing.samples) == 1


def test_missing_columns_files_and_odd_encodings_are_errors_with_a_hint(tmp_path):
    with pytest.raises(DataError, match=r"no column 'path_target'\n.*did you mean 'path_targets'"):
        read_source(csv_source(tmp_path, "path_targets,prompt\na,b\n"))
    with pytest.raises(DataError, match="no column 'prompt'"):
        read_source(jsonl_source(tmp_path, {"path_target": "t"}))
    with pytest.raises(DataError, match="no file"):
        read_source(CsvSource(type="csv", path=tmp_path / "absent.csv"))
    (tmp_path / "latin.csv").write_bytes(HEADER.encode() + b"t,,,caf\xe9,\n")
    with pytest.raises(DataError, match="save it as UTF-8"):
        read_source(CsvSource(type="csv", path=tmp_path / "latin.csv"))


def test_a_table_from_a_spreadsheet_is_read(tmp_path):
    (tmp_path / "table.csv").write_bytes(
        b"\xef\xbb\xbf" + (HEADER + 't,c,,"two\nlines",\n').replace("\n", "\r\n").encode()
    )
    (example,) = read_source(CsvSource(type="csv", path=tmp_path / "table.csv")).samples
    assert example.prompt.split() == ["two", "lines"]


def test_samples_know_their_source_and_rate(tmp_path):
    source = csv_source(tmp_path, HEADER + "t,,,p,\n", repeats=3, weight=0.5)
    (example,) = read_source(source, is_prior=True).samples
    assert (example.rate, example.is_prior, example.source) == (1.5, True, str(tmp_path / "table.csv"))


def test_a_row_whose_file_is_missing_is_a_fault_of_that_row(tmp_path, config):
    from qflux.data.dataset import gather
    from qflux.data.images.index import FileIndex
    from qflux.models import get_family

    Image.new("RGB", (64, 64)).save(tmp_path / "t.png")
    csv_source(tmp_path, HEADER + "t.png,,,p,\ngone.png,,,p,\n")
    data = config("data.path=null", f"data.sources=[{{type: csv, path: {tmp_path / 'table.csv'}}}]").data
    gathered = gather(data, get_family("flux-kontext"), FileIndex(tmp_path / "index"))
    assert len(gathered.training) == 1
    assert [str(fault) for fault in gathered.faults] == [
        f"gone.png: {tmp_path / 'gone.png'} can't be read as an image: No such file or directory"
    ]


def test_a_comma_without_quotes_is_a_fault_not_a_shorter_prompt(tmp_path):
    listing = read_source(csv_source(tmp_path, "path_target,prompt\nt.png,make it red, and keep the sky\nt.png,fine\n"))
    assert "a text with a comma needs quotes" in str(listing.faults[0])
    assert [example.prompt for example in listing.samples] == ["fine"]


def test_rows_are_named_by_their_first_line(tmp_path):
    listing = read_source(csv_source(tmp_path, 'path_target,prompt\nt,"two\nlines"\nt,\n'))
    assert [example.place[-1] for example in listing.samples] == ["2"]
    assert str(listing.faults[0]).split(":")[1] == "4"


def test_samples_are_called_by_their_image_and_told_apart_where_they_share_it(tmp_path):
    rows = "a/t.png,one\na/t.png,two\nb/t.png,three\n"
    listing = read_source(csv_source(tmp_path, f"path_target,prompt\n{rows}"))
    place = f"{tmp_path.name}/table.csv"
    assert [e.name for e in listing.samples] == [f"a/t.png ({place}:2)", f"a/t.png ({place}:3)", "b/t.png"]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_any_separator_will_do(separator, tmp_path):
    text = "path_target,path_control,prompt\nt,c,words\n".replace(",", separator)
    (example,) = read_source(csv_source(tmp_path, text)).samples
    assert (example.name, example.prompt, len(example.controls)) == ("t", "words", 1)


def test_controls_may_have_columns_of_their_own(tmp_path):
    columns = TableColumns(target="t", controls=("x", "y", "z"), prompt="p")
    listing = read_source(csv_source(tmp_path, "t,x,y,z,p\nt,1,2,,words\nt2,1,,3,words\n", columns=columns))
    assert [[image.path.name for image in e.controls] for e in listing.samples] == [["1", "2"]]
    assert "y is empty, but z is not" in str(listing.faults[0])
    with pytest.raises(DataError, match="no column 'w'"):
        read_source(
            csv_source(tmp_path, "t,x,p\n1,2,3\n", columns=TableColumns(target="t", controls=("w",), prompt="p"))
        )


@pytest.mark.parametrize(
    "content", [[{"path_target": "t", "prompt": "p"}], {"data": [{"path_target": "t", "prompt": "p"}]}]
)
def test_a_json_list_is_a_table(content, tmp_path):
    (tmp_path / "table.json").write_text(json.dumps(content))
    (example,) = read_source(JsonlSource(type="jsonl", path=tmp_path / "table.json")).samples
    assert example.name == "t"
    (tmp_path / "table.json").write_text('"words"')
    with pytest.raises(DataError, match="holds no list of samples"):
        read_source(JsonlSource(type="jsonl", path=tmp_path / "table.json"))


def test_a_missing_file_is_named_with_the_folder_it_was_looked_for_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"no file mine.csv .looked for in {tmp_path}"):
        read_source(CsvSource(type="csv", path=Path("mine.csv")))


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("path_target,prompt,path_controls", TableColumns()),
        ("path_target,prompt,before", TableColumns(control="befor")),
        ("path_target,prompt", TableColumns(mask="region")),
        ("path_target,prompt,prompt", TableColumns()),
        ("path_targets,prompt", TableColumns()),
    ],
)
def test_columns_that_are_misspelt_asked_for_or_doubled_are_errors(tmp_path, header, columns):
    with pytest.raises(DataError, match="column"):
        read_source(csv_source(tmp_path, header + "\n", columns=columns))


def test_samples_without_a_control_are_mentioned(tmp_path):
    listing = read_source(csv_source(tmp_path, "path_target,prompt\nt,p\n"))
    assert "1 of 1 samples have no control image" in listing.notes[0]
