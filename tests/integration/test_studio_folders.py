"""A studio on folders as people have them: pictures in a layout of their own, with everything it makes among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from PIL import Image

from qflux.config import load_config
from qflux.data.sources import read_source
from qflux.errors import DataError
from qflux.studio.drafts import checked
from qflux.studio.library import Library
from qflux.studio.starting import draft
from qflux.studio.workspace import Workspace


@pytest.fixture
def pictures(tmp_path) -> Path:
    """before/ and after/, and one prompt for all."""
    for kind, colour in (("before", "skyblue"), ("after", "navy")):
        (tmp_path / "mine" / kind).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (64 + 16 * number, 64), colour).save(tmp_path / f"mine/{kind}/p{number}.png")
    (tmp_path / "mine/prompt.txt").write_text("make it night")
    return tmp_path / "mine"


def test_pictures_in_their_own_layout_are_opened_corrected_and_trained_on(pictures, monkeypatch):
    workspace = Workspace.opened(pictures)
    (found,) = Library(workspace).sets()
    assert found["samples"] == 5
    data = Library(workspace)[found["id"]]
    first = data.window(0, 10, "", "")["rows"][0]["name"]
    data.change([{"sample": first, "prompt": "make it dark"}])
    mask = pictures / "painted.png"
    Image.new("L", (64, 64), 255).save(mask)
    data.paint(first, mask.read_bytes())
    mask.unlink()
    text = draft(workspace, data, {"model": "qflux-small"})
    config, problems = checked(text, workspace)
    assert problems == []
    assert config is not None

    # What it has made lies among the pictures now, and is none of them.
    (pictures / "runs/first/samples").mkdir(parents=True)
    for name in ("config.yaml", "ledger.jsonl"):
        (pictures / "runs/first" / name).write_text("")
    Image.new("RGB", (64, 64)).save(pictures / "runs/first/samples/a.png")
    again = Library(workspace)[found["id"]]
    assert again.window(0, 10, "", "")["total"] == 5
    assert again.sample(first).prompt == "make it dark"
    assert again.sample(first).mask is not None

    # And in a terminal in that folder, the config means the same.
    monkeypatch.chdir(pictures)
    (source,) = load_config(yaml.safe_load(text)).data.training_sources
    listing = read_source(source)
    assert not listing.faults
    assert {sample.prompt for sample in listing.samples} == {"make it night", "make it dark"}


def test_a_folder_without_pairs_says_so(tmp_path):
    workspace = Workspace.opened(tmp_path)
    assert Library(workspace).sets() == []
    with pytest.raises(DataError, match="there is no folder"):
        Workspace.opened(tmp_path / "nowhere")
