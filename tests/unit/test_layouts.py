"""However somebody's pictures are organised, pairs are found, and what is not used is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from qflux.config import load_config
from qflux.data.sources import read_source
from qflux.errors import DataError
from qflux.start.layouts import Wish, discover


def folder_of(root: Path, *files: str, **texts: str) -> Path:
    """A folder with pictures, and texts under names in which `__` stands for a slash and `_dot_` for a dot."""
    for number, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number * 7 % 256, 40, 90)).save(root / file)
    for name, text in texts.items():
        place = root / name.replace("__", "/").replace("_dot_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return root


def pairs(root: Path, wish: Wish | None = None) -> list[tuple[list[str], str, str]]:
    """(controls, target, prompt) of every sample, whether a table has to be written or not."""
    found = discover(root, wish)
    source = dict(found.source)
    if found.rows:
        table = root.parent / "rows.jsonl"
        table.write_text("".join(json.dumps(row) + "\n" for row in found.rows))
        source = {"type": "jsonl", "path": str(table), "root": source.get("root", str(root))}
    config = load_config({"model": {"pretrained": "-"}, "data": {"sources": [source]}})
    listing = read_source(config.data.training_sources[0])
    assert not listing.faults
    short = [Path(source.get("root") or source["path"]), root]
    base = next(place for place in short if place.is_dir())
    return [
        ([str(c).removeprefix(f"{base}/") for c in e.controls], str(e.target).removeprefix(f"{base}/"), e.prompt)
        for e in listing.samples
    ]


SAME = ("1.png", "2.jpg")


@pytest.mark.parametrize(
    ("files", "texts", "expected"),
    [
        pytest.param(
            ["before/1.png", "after/1.jpg", "before/2.png", "after/2.png"],
            {"after__1_dot_txt": "one", "before__2_dot_txt": "two"},
            [(["before/1.png"], "after/1.jpg", "one"), (["before/2.png"], "after/2.png", "two")],
            id="two folders, texts in either",
        ),
        pytest.param(
            ["day/1.png", "night/1.png", "day/2.png", "night/2.png"],
            {},
            [(["day/1.png"], "night/1.png", "day to night"), (["day/2.png"], "night/2.png", "day to night")],
            id="two folders whose names say nothing",
        ),
        pytest.param(
            ["control_1/1.png", "control_2/1.png", "target/1.png"],
            {"target__1_dot_txt": "x"},
            [(["control_1/1.png", "control_2/1.png"], "target/1.png", "x")],
            id="several control folders",
        ),
        pytest.param(
            ["input/1.png", "style/1.png", "output/1.png", "masks/1.png"],
            {"prompt_dot_txt": "for all"},
            [(["input/1.png", "style/1.png"], "output/1.png", "for all")],
            id="a reference, and one text for all",
        ),
        pytest.param(
            ["x_a.png", "x_b.png", "y-A.jpg", "y-B.png"],
            {},
            [(["x_a.png"], "x_b.png", "a to b"), (["y-A.jpg"], "y-B.png", "a to b")],
            id="_a and _b",
        ),
        pytest.param(
            ["x_before.png", "x_after.png", "x_control_1.png", "x_mask.png"],
            {"x_dot_txt": "warm"},
            [(["x_before.png", "x_control_1.png"], "x_after.png", "warm")],
            id="ends of names",
        ),
        pytest.param(
            ["train/before/a/1.png", "train/after/a/1.png", "val/before/1.png", "val/after/1.png"],
            {"captions__val__1_dot_txt": "c", "captions__train__a__1_dot_txt": "d"},
            [
                (["train/before/a/1.png"], "train/after/a/1.png", "d"),
                (["val/before/1.png"], "val/after/1.png", "c"),
            ],
            id="in subfolders, texts in a tree of their own",
        ),
        pytest.param(
            ["s1/before.png", "s1/after.png", "style_2/before.png", "style_2/after.png"],
            {"s1__prompt_dot_txt": "one", "style_2__prompt_dot_txt": "two"},
            [(["s1/before.png"], "s1/after.png", "one"), (["style_2/before.png"], "style_2/after.png", "two")],
            id="a folder for each sample",
        ),
        pytest.param(
            ["修改后/猫.png", "修改前/猫.png", "蒙版/猫.png", "修改后/狗.png", "修改前/狗.png"],
            {"修改后__猫_dot_txt": "变成夜晚", "修改后__狗_dot_txt": "变成夜晚"},
            [(["修改前/猫.png"], "修改后/猫.png", "变成夜晚"), (["修改前/狗.png"], "修改后/狗.png", "变成夜晚")],
            id="in Chinese",
        ),
        pytest.param(
            ["输出/1.png", "输入/1.png"],
            {},
            [(["输入/1.png"], "输出/1.png", "输入 to 输出")],
            id="in Chinese, in the other order",
        ),
        pytest.param(
            ["trainA/1.png", "trainB/1.png"],
            {},
            [(["trainA/1.png"], "trainB/1.png", "trainA to trainB")],
            id="A and B",
        ),
        pytest.param(
            ["Inputs/1_in.png", "Outputs/1_out.png"],
            {"Outputs__1_out_dot_txt": "t"},
            [(["Inputs/1_in.png"], "Outputs/1_out.png", "t")],
            id="folders and ends",
        ),
        pytest.param(
            ["a.png", "b.jpg"],
            {"a_dot_txt": "A", "b_dot_caption": "B"},
            [([], "a.png", "A"), ([], "b.jpg", "B")],
            id="captions beside pictures",
        ),
        pytest.param(
            ["cat_before.png", "cat_after.png", *(f"{n}.png" for n in range(6))],
            {f"{n}_dot_txt": f"t{n}" for n in ("0", "1", "2", "3", "4", "5", "cat_before", "cat_after")},
            [([], f"{n}.png", f"t{n}") for n in ("0", "1", "2", "3", "4", "5", "cat_after", "cat_before")],
            id="captions, among them names that only look like a pair",
        ),
        pytest.param(
            ["i/a.png", "i/b.png"],
            {"t_dot_csv": "source;edited;instruction\ni/a.png;i/b.png;make, it\n"},
            [(["i/a.png"], "i/b.png", "make, it")],
            id="semicolons",
        ),
        pytest.param(
            ["i/a.png", "i/b.png"],
            {"t_dot_tsv": "file_name\tcontrol_file_name\ttext\ni/b.png\ti/a.png\tx\n"},
            [(["i/a.png"], "i/b.png", "x")],
            id="tabs and file names",
        ),
        pytest.param(
            ["train/a.png"],
            {"train__metadata_dot_jsonl": '{"file_name": "a.png", "text": "hello"}\n'},
            [([], "train/a.png", "hello")],
            id="metadata beside the pictures",
        ),
        pytest.param(
            ["i/a.png", "i/b.png"],
            {"t_dot_json": json.dumps([{"image": "i/a.png", "edited_image": "i/b.png", "caption": "x"}])},
            [(["i/a.png"], "i/b.png", "x")],
            id="a JSON list",
        ),
        pytest.param(
            ["a.png", "b.png", "c.png", "d.png"],
            {"t_dot_csv": "control_1,control_2,ref_image,target,prompt\na.png,b.png,c.png,d.png,p\n"},
            [(["a.png", "b.png", "c.png"], "d.png", "p")],
            id="several control columns",
        ),
        pytest.param(
            ["a.png", "b.png", "d.png"],
            {"t_dot_jsonl": json.dumps({"source": ["a.png", "b.png"], "target": "d.png", "prompt": "p"}) + "\n"},
            [(["a.png", "b.png"], "d.png", "p")],
            id="a list of controls in JSON",
        ),
    ],
)
def test_every_usual_layout_is_understood(files, texts, expected, tmp_path):
    root = folder_of(tmp_path / "my data", *files, **texts)
    assert sorted(pairs(root), key=lambda pair: pair[1]) == sorted(expected, key=lambda pair: pair[1])


def same(*folders: str, names: tuple[str, ...]) -> list[str]:
    return [f"{folder}/{name}.png" for folder in folders for name in names]


TRAPS = {
    "numbered pairs": (
        [f"{kind}_{n}.png" for kind in ("before", "after") for n in range(4)],
        {f"before_{n}.png": f"after_{n}.png" for n in range(4)},
    ),
    "numbers without a dash": (
        [f"{kind}{n}.png" for kind in ("input", "output") for n in range(1, 4)],
        {f"input{n}.png": f"output{n}.png" for n in range(1, 4)},
    ),
    "numbered pairs with names": (
        [f"cat_{kind}_{n}.png" for kind in ("before", "after") for n in range(3)],
        {f"cat_before_{n}.png": f"cat_after_{n}.png" for n in range(3)},
    ),
    "numbered folders": (
        same("before_1", "after_1", "before_2", "after_2", names=("x", "y")),
        {f"before_{n}/{name}.png": f"after_{n}/{name}.png" for n in (1, 2) for name in "xy"},
    ),
    "sessions": (
        same("session1_before", "session1_after", "session2_before", "session2_after", names=("1",)),
        {f"session{n}_before/1.png": f"session{n}_after/1.png" for n in (1, 2)},
    ),
    "names that end like masks": (
        same("before", "after", names=("gas_mask", "face_mask", "scuba_mask")),
        {f"before/{name}_mask.png": f"after/{name}_mask.png" for name in ("gas", "face", "scuba")},
    ),
    "names that end like controls": (
        same("before", "after", names=("drive_in_01", "drive_in_02", "kitchen_1", "check_in_1")),
        {f"before/{n}.png": f"after/{n}.png" for n in ("drive_in_01", "drive_in_02", "kitchen_1", "check_in_1")},
    ),
    "raw and edited": (same("edited", "raw", names=("1",)), {"raw/1.png": "edited/1.png"}),
    "one name says it": (same("after", "photos", names=("1",)), {"photos/1.png": "after/1.png"}),
    "the other says it": (same("images", "source", names=("1",)), {"source/1.png": "images/1.png"}),
    "not edited": (same("edited", "not_edited", names=("1",)), {"not_edited/1.png": "edited/1.png"}),
    "ground truth": (same("ground_truth", "input", names=("1",)), {"input/1.png": "ground_truth/1.png"}),
    "subjects": (
        same("subject_1/before", "subject_1/after", "subject_2/before", "subject_2/after", names=("1", "2")),
        {f"subject_{s}/before/{n}.png": f"subject_{s}/after/{n}.png" for s in (1, 2) for n in (1, 2)},
    ),
    "splits": (
        same("training/input", "training/target", "test/input", "test/target", names=("1",)),
        {f"{split}/input/1.png": f"{split}/target/1.png" for split in ("training", "test")},
    ),
    "words around": (
        same("style_anime/before", "style_anime/after", "edits/before", "edits/after", names=("1",)),
        {f"{kind}/before/1.png": f"{kind}/after/1.png" for kind in ("style_anime", "edits")},
    ),
    "two kinds": (
        [*same("cats_before", "cats_after", "dogs_before", "dogs_after", names=("1", "2")), "cats_before/3.png"],
        {f"{kind}_before/{n}.png": f"{kind}_after/{n}.png" for kind in ("cats", "dogs") for n in (1, 2)},
    ),
    "a plain name and its edit": (
        [f"cat{n}{end}.png" for n in range(3) for end in ("", "_edited")],
        {f"cat{n}.png": f"cat{n}_edited.png" for n in range(3)},
    ),
    "ends in folders, and a cover": (
        [
            *(f"{kind}/{n}_{kind}.png" for kind in ("before", "after") for n in range(3)),
            *same("before", "after", names=("cover",)),
        ],
        {f"before/{n}_before.png": f"after/{n}_after.png" for n in range(3)} | {"before/cover.png": "after/cover.png"},
    ),
    "Chinese ends": (
        [f"{name}{end}.png" for name in "猫狗鸟" for end in "前后"],
        {f"{name}前.png": f"{name}后.png" for name in "猫狗鸟"},
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_no_pair_is_made_of_what_does_not_belong_together(name, tmp_path):
    files, expected = TRAPS[name]
    root = folder_of(tmp_path / "d", *files)
    found = pairs(root, Wish(prompt="x"))
    assert {tuple(controls): target for controls, target, _ in found} == {(a,): b for a, b in expected.items()}


@pytest.mark.parametrize(
    "folders", [("cats", "dogs"), ("train", "val"), ("images", "masks")], ids=lambda folders: folders[0]
)
def test_two_sets_of_pictures_are_not_pairs(folders, tmp_path):
    root = folder_of(tmp_path / "d", *same(*folders, names=("1", "2")))
    for folder in folders:
        for number in (1, 2):
            (root / folder / f"{number}.txt").write_text(f"{folder} number {number}")
    assert all(not controls for controls, _, _ in pairs(root))


def test_chinese_words_that_end_like_roles_are_captions_all_the_same(tmp_path):
    names = ("午后", "皇后", "门前", "目前")
    root = folder_of(tmp_path / "d", *(f"{name}.png" for name in names))
    for name in names:
        (root / f"{name}.txt").write_text(name)
    assert [controls for controls, _, _ in pairs(root)] == [[]] * 4


def test_what_qflux_has_written_beside_the_data_is_not_taken_for_data(tmp_path):
    root = folder_of(tmp_path / "d", "before/1.png", "after/1.png", "runs/d/samples/control/1.png")
    for name in ("runs/d/config.yaml", "runs/d/ledger.jsonl", "runs/cache/index.jsonl", "before/notes.csv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("file,x\n1,2\n")
    (root / "runs/cache/entries").mkdir()
    assert pairs(root) == [(["before/1.png"], "after/1.png", "before to after")]


def test_large_folders_are_read_quickly(tmp_path, monkeypatch):
    """Counted, not timed: how often a path is asked for what stands beside it."""
    root = folder_of(tmp_path / "d", "before/0.png", "after/0.png")
    for number in range(1, 400):
        for kind in ("before", "after"):
            (root / kind / f"{number}.png").touch()
        (root / "after" / f"{number}.txt").write_text("x")
        (root / f"lonely_{number}_before.png").touch()
    calls = []
    known = Path.with_suffix
    monkeypatch.setattr(Path, "with_suffix", lambda self, suffix: calls.append(1) or known(self, suffix))
    assert len(discover(root).rows) == 399
    assert len(calls) < 100 * 1600


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(target="r", controls=("p", "q")), [(["p/1.png", "q/1.png"], "r/1.png", "p to r")]),
        (Wish(target="r/*", controls=("q/*.png",), prompt="x"), [(["q/1.png"], "r/1.png", "x")]),
    ],
)
def test_anything_else_can_be_described(wish, expected, tmp_path):
    root = folder_of(tmp_path / "d", "p/1.png", "q/1.png", "r/1.png")
    with pytest.raises(DataError, match="no data of a known organisation"):
        discover(root)
    assert pairs(root, wish) == expected


def test_columns_can_be_named(tmp_path):
    root = folder_of(tmp_path / "d", "a.png", "b.png", "c.png", t_dot_csv="x,y,z,p\na.png,b.png,c.png,words\n")
    with pytest.raises(DataError, match="no column looks like the wanted image"):
        discover(root)
    named = Wish(columns={"target": "z", "control": "x,y", "prompt": "p"})
    assert pairs(root, named) == [(["a.png", "b.png"], "c.png", "words")]
    assert pairs(root, Wish(prompt="for all", target="z", controls=("y",))) == [(["b.png"], "c.png", "for all")]
    with pytest.raises(DataError, match="has no column 'w'"):
        discover(root, Wish(target="w"))


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        (
            "original_prompt,original_image,edit_prompt,edited_prompt,edited_image",
            "a cat,a.png,make it night,a cat at night,b.png",
            (["a.png"], "b.png", "make it night"),
        ),
        ("image_id,image,caption", "17,a.png,a cat", ([], "a.png", "a cat")),
        ("before_image,after_image,source,prompt", "a.png,b.png,flickr,p", (["a.png"], "b.png", "p")),
        ("source_image,edited_image,clip_sim_target,edit_instruction", "a.png,b.png,0.3,p", (["a.png"], "b.png", "p")),
    ],
)
def test_columns_are_known_by_what_they_hold_too(header, row, expected, tmp_path):
    root = folder_of(tmp_path / "d", "a.png", "b.png", t_dot_csv=f"{header}\n{row}\n")
    assert pairs(root) == [expected]


def test_a_prompt_for_all_fills_the_gaps_of_tables_and_folders(tmp_path):
    rows = [{"source": ["a.png", "b.png"], "target": "c.png"}, {"source": "a.png", "target": "b.png", "prompt": "own"}]
    root = folder_of(tmp_path / "d", "a.png", "b.png", "c.png", t_dot_jsonl="\n".join(map(json.dumps, rows)) + "\n{")
    wish = Wish(prompt="x")
    assert pairs(root, wish) == [(["a.png", "b.png"], "c.png", "x"), (["a.png"], "b.png", "own")]
    assert any("t.jsonl:3 can't be read" in note for note in discover(root, wish).notes)
    own = folder_of(tmp_path / "e", "training_images/1.png", "control_images/1.png", "control_images/1_control_1.png")
    files = ["control_images/1.png", "control_images/1_control_1.png"]
    assert pairs(own, wish) == [(files, "training_images/1.png", "x")]


@pytest.mark.parametrize("wish", [Wish(mask="m"), Wish(columns={"target": "x"})])
def test_options_that_would_have_no_effect_are_errors(wish, tmp_path):
    root = folder_of(tmp_path / "d", "before/1.png", "after/1.png")
    with pytest.raises(DataError, match=r"--mask needs|--columns is for a table"):
        discover(root, wish)


def test_what_has_no_partner_or_no_text_is_named(tmp_path):
    root = folder_of(tmp_path / "d", "before/1.png", "after/1.png", "after/2.png", "other.png", "before/3.png")
    folder_of(root, "after/3.png", after__1_dot_txt="one")
    found = discover(root)
    assert len(found.rows) == 1
    assert any("without a partner: other.png, after/2.png (2)" in note for note in found.notes)
    assert any("without a text: 3 (1)" in note for note in found.notes)


def test_what_is_not_understood_is_shown_with_what_was_tried(tmp_path):
    root = folder_of(tmp_path / "d", "x/1.png", "y/2.png", "z/3.png", "4.png")
    with pytest.raises(DataError) as raised:
        discover(root)
    for expected in ("x/", "1 .png: 1.png", "tried:", "before, after", "--control", "docs/data.md"):
        assert expected in str(raised.value)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"\(nothing\)"):
        discover(empty)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(target="nowhere"), "nothing in .* fits 'nowhere'"),
        (Wish(target="a/*", controls=("b/*",)), "have no name in common"),
        (Wish(target="*/*"), "has 2 of"),
        (Wish(target="a", controls=("c", "d")), "no sample in .* is complete"),
    ],
)
def test_a_description_that_fits_nothing_says_so(wish, message, tmp_path):
    root = folder_of(tmp_path / "d", "a/1.png", "a/3.png", "b/2.png", "c/1.png", "d/3.png")
    with pytest.raises(DataError, match=message):
        discover(root, wish)
