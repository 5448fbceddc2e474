from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from qflux.data.sources.folder import read_folder
from qflux.errors import DataError


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two complete samples, one with two further controls and a mask."""
    for name in (
        "training_images/a.png",
        "training_images/b.jpg",
        "control_images/a.png",
        "control_images/a_control_1.webp",
        "control_images/a_control_2.png",
        "control_images/a_mask.png",
        "control_images/b.png",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (16, 16)).save(path)
    (tmp_path / "training_images/a.txt").write_text("make it red\n")
    (tmp_path / "training_images/b.txt").write_text("make it blue")
    return tmp_path


def fault(folder: Path) -> str:
    return "\n".join(map(str, read_folder(folder).faults))


def test_a_folder_becomes_samples(folder):
    a, b = read_folder(folder).samples
    assert (a.name, a.prompt) == ("a", "make it red")
    assert [image.path.name for image in a.controls] == ["a.png", "a_control_1.webp", "a_control_2.png"]
    assert a.mask.path.name == "a_mask.png"
    assert (b.prompt, len(b.controls), b.mask) == ("make it blue", 1, None)


def test_a_mask_may_lie_beside_the_target(folder):
    (folder / "control_images/a_mask.png").rename(folder / "training_images/a_mask.png")
    assert read_folder(folder).samples[0].mask.path.parent.name == "training_images"
    assert len(read_folder(folder).samples) == 2


def test_a_target_without_control_is_a_sample(folder):
    (folder / "control_images/b.png").unlink()
    assert read_folder(folder).samples[1].controls == ()


def test_names_that_look_like_controls_or_masks_of_nothing_are_targets(folder):
    for name in ("scene_control_1", "the_mask"):
        Image.new("RGB", (16, 16)).save(folder / f"training_images/{name}.png")
        (folder / f"training_images/{name}.txt").write_text("x")
    assert {example.name for example in read_folder(folder).samples} == {"a", "b", "scene_control_1", "the_mask"}


def test_every_fault_is_reported_with_its_file(folder):
    (folder / "training_images/a.txt").unlink()
    (folder / "training_images/lonely.txt").write_text("prompt without image")
    (folder / "control_images/a_control_1.webp").unlink()
    Image.new("RGB", (16, 16)).save(folder / "control_images/stray.png")
    Image.new("RGB", (16, 16)).save(folder / "training_images/b.png")
    message = fault(folder)
    assert len(message.splitlines()) == 5
    assert "a.png: no prompt a.txt" in message
    assert "lonely.txt: a prompt without an image" in message
    assert "control 1 is missing (control_images/a_control_1.*)" in message
    assert "stray.png: no target of that name" in message
    assert "a second image named 'b'" in message


def test_a_further_control_without_the_first_is_a_gap(folder):
    (folder / "control_images/a.png").unlink()
    assert "control 0 is missing (control_images/a.*)" in fault(folder)


def test_two_masks_are_ambiguous(folder):
    Image.new("L", (16, 16)).save(folder / "training_images/a_mask.png")
    assert "a second mask of 'a'" in fault(folder)


@pytest.mark.parametrize("content", [b"", b"  \n", b"\xff\xfe\x00"])
def test_prompts_that_say_nothing_are_named(folder, content):
    (folder / "training_images/a.txt").write_bytes(content)
    assert "a.txt" in fault(folder)


def test_missing_and_empty_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="training_images"):
        read_folder(tmp_path)
    (tmp_path / "training_images").mkdir()
    assert read_folder(tmp_path).samples == []


def test_files_that_are_not_used_are_mentioned(folder):
    (folder / "control_images/notes.docx").write_text("x")
    (folder / "control_images/.hidden").write_text("x")
    notes = " ".join(read_folder(folder).notes)
    assert "notes.docx" in notes
    assert ".hidden" not in notes


@pytest.mark.parametrize("name", ["a_control_0", "a_control_01"])
def test_control_numbers_that_could_collide_are_refused(folder, name):
    Image.new("RGB", (16, 16)).save(folder / f"control_images/{name}.png")
    assert f"{name}.png: no target of that name" in fault(folder)


def test_samples_without_a_control_among_others_are_mentioned(folder):
    (folder / "control_images/b.png").unlink()
    notes = " ".join(read_folder(folder).notes)
    assert "1 of 2 samples have no control image: b" in notes


def test_a_missing_control_folder_and_subfolders_are_mentioned(folder):
    (folder / "control_images").rename(folder / "controls")
    (folder / "training_images/more").mkdir()
    notes = " ".join(read_folder(folder).notes)
    assert "there is no folder" in notes
    assert "more/" in notes


def test_prompts_from_other_systems_are_read(folder):
    (folder / "training_images/a.txt").unlink()
    (folder / "training_images/a.TXT").write_bytes(b"\xef\xbb\xbfmake it red\r\n")
    assert read_folder(folder).samples[0].prompt == "make it red"


def test_what_is_unclear_about_a_sample_leaves_it_out(folder):
    """Skipping a fault must not mean training without what was meant."""
    Image.new("RGB", (16, 16)).save(folder / "control_images/A_control_1.png")
    assert [example.name for example in read_folder(folder).samples] == ["b"]
    (folder / "control_images/A_control_1.png").unlink()
    Image.new("RGB", (16, 16)).save(folder / "control_images/b_control_01.png")
    assert [example.name for example in read_folder(folder).samples] == ["a"]
    Image.new("RGB", (16, 16)).save(folder / "training_images/a.jpg")
    assert read_folder(folder).samples == []
