"""Corrections of a data set: folded from lines that only grow, applied to what a source lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from qflux.config import CacheSource, FolderSource
from qflux.data.sources import read_source
from qflux.data.sources.corrections import FILE, Corrections
from qflux.errors import DataError

NAMES = ("cat", "dog", "owl")
CHANGES = st.fixed_dictionaries(
    {"sample": st.sampled_from(NAMES)},
    optional={"prompt": st.none() | st.sampled_from(["a", "b", "c"]), "excluded": st.none() | st.booleans()},
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(CHANGES, min_size=1, max_size=3) | st.sampled_from(["undo", "redo"]), max_size=14))
def test_any_walk_through_changes_undo_and_redo_is_that_of_a_stack(tmp_path_factory, walk):
    """Against two plain stacks; and read again from the file, it is the same."""
    folder = tmp_path_factory.mktemp("corrections")
    corrections = Corrections(folder)
    done: list[list[dict]] = []
    undone: list[list[dict]] = []
    for action in walk:
        if action == "undo":
            assert corrections.undo() == bool(done)
            undone += [done.pop()] if done else []
        elif action == "redo":
            assert corrections.redo() == bool(undone)
            done += [undone.pop()] if undone else []
        else:
            corrections.add(action)
            done.append(action)
            undone.clear()
    said: dict[str, dict] = {}
    for changes in done:
        for change in changes:
            said.setdefault(change["sample"], {}).update({k: v for k, v in change.items() if k != "sample"})
    wanted = {name: {k: v for k, v in about.items() if v is not None} for name, about in said.items()}
    wanted = {name: about for name, about in wanted.items() if about}
    assert corrections.of() == wanted
    assert Corrections.read(folder).of() == wanted


@pytest.fixture
def data(tmp_path) -> Path:
    for kind in ("training_images", "control_images"):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for name in NAMES:
            Image.new("RGB", (16, 16)).save(tmp_path / "data" / kind / f"{name}.png")
    for name in NAMES:
        (tmp_path / f"data/training_images/{name}.txt").write_text(f"paint the {name}")
    (tmp_path / "data/training_images/cat_caption_1.txt").write_text("another wording")
    return tmp_path


def test_a_source_is_read_as_it_was_corrected(data):
    folder = data / "data.corrections"
    source = FolderSource(path=data / "data", corrections=folder)
    assert [sample.name for sample in read_source(source).samples] == ["cat", "dog", "owl"], "none yet"
    corrections = Corrections(folder)
    corrections.add([{"sample": "cat", "prompt": " feed the cat "}, {"sample": "dog", "excluded": True}])
    corrections.add([{"sample": "owl", "mask": "masks/../../owl-1.png"}, {"sample": "fox", "prompt": "who?"}])
    listing = read_source(source)
    cat, owl = listing.samples
    assert (cat.prompt, cat.further_captions) == ("feed the cat", ())
    assert owl.mask.path == folder / "masks/owl-1.png", "a mask is one of the folder's own"
    notes = "\n".join(listing.notes)
    assert "1 samples are left out: dog" in notes
    assert "1 samples that are not there: fox" in notes


def test_two_who_write_do_not_undo_each_other(tmp_path):
    """Two pages, each with what it has read."""
    mine, yours = Corrections.read(tmp_path), Corrections.read(tmp_path)
    mine.add([{"sample": "cat", "prompt": "mine"}])
    yours.add([{"sample": "dog", "prompt": "yours"}])
    assert mine.undo(), "the last change, whoever made it"
    assert Corrections.read(tmp_path).of() == mine.of() == {"cat": {"prompt": "mine"}}
    assert yours.redo()
    assert Corrections.read(tmp_path).of() == {"cat": {"prompt": "mine"}, "dog": {"prompt": "yours"}}


def test_a_torn_or_foreign_line_is_none(data):
    folder = data / "data.corrections"
    Corrections(folder).add([{"sample": "cat", "prompt": "x"}])
    with (folder / FILE).open("a") as file:
        file.write('{"id": 2, "changes": "no list"}\nnull\n{"undo": "1"}\n{"id": 3, "changes": [{"sample": "do')
    again = Corrections.read(folder)
    assert again.of() == {"cat": {"prompt": "x"}}
    again.add([{"sample": "dog", "excluded": True}])
    assert Corrections.read(folder).of() == {"cat": {"prompt": "x"}, "dog": {"excluded": True}}


@pytest.mark.parametrize(
    "change",
    [{"sample": 3}, {"sample": "cat", "prompt": ""}, {"sample": "cat", "what": 1}, {"sample": "cat", "mask": 4}],
)
def test_what_means_nothing_is_refused_and_not_written(tmp_path, change):
    with pytest.raises(DataError):
        Corrections(tmp_path).add([change])
    assert not (tmp_path / FILE).exists()


def test_a_cache_has_nothing_to_correct(tmp_path):
    with pytest.raises(ValueError, match="embeddings of them only"):
        CacheSource(type="cache", path=tmp_path, corrections=tmp_path)
