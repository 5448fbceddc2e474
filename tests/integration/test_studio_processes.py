"""Jobs of the studio: begun once, however many look after them; alive while the command is, whoever was killed."""

from __future__ import annotations

import json
import os
import signal

import pytest
from PIL import Image

from qflux.errors import ConfigError
from qflux.studio import starting
from qflux.studio.library import Library
from qflux.studio.processes import Job, JobFolder
from qflux.studio.queue import Queue
from qflux.studio.workspace import Workspace
from studios import wait_for


@pytest.fixture
def lasting(tmp_path) -> JobFolder:
    """A job that goes on until it is interrupted: another studio."""
    (tmp_path / "empty").mkdir()
    command = ["studio", str(tmp_path / "empty"), "--port", "0", "--no-browser"]
    return JobFolder.create(tmp_path / "jobs", Job("train", command, {"run": "runs/x"}, "cpu"))


def begun(job: JobFolder) -> None:
    wait_for(lambda: "Ctrl-C closes it" in job.log())


def test_a_job_is_begun_once_by_however_many_studios(lasting, tmp_path):
    assert lasting.state == "queued"
    for _ in range(3):
        lasting.start(tmp_path, {})
    assert lasting.state == "running", "at once, before its process has come so far"
    begun(lasting)
    queues = [Queue(tmp_path / "jobs", tmp_path) for _ in range(2)]
    for queue in queues:
        queue.advance()
    assert lasting.log().count("Ctrl-C closes it") == 1
    lasting.stop()
    wait_for(lambda: lasting.state in ("done", "stopped"))


def test_a_job_whose_waiter_was_killed_runs_on_keeps_its_lane_and_can_be_stopped(lasting, tmp_path):
    lasting.start(tmp_path, {})
    begun(lasting)
    os.kill(int((lasting.path / "pid").read_text()), signal.SIGKILL)
    assert lasting.state == "running"
    queue = Queue(tmp_path / "jobs", tmp_path)
    waiting = queue.add(Job("train", ["--version"], {}, "cpu"))
    assert waiting.state == "queued", "its lane is taken"
    lasting.stop()
    wait_for(lambda: lasting.state == "interrupted")
    queue.advance()
    wait_for(lambda: waiting.state == "done")


def test_a_second_stop_is_no_second_interruption(lasting, tmp_path, monkeypatch):
    sent = []
    real = os.killpg
    monkeypatch.setattr(os, "killpg", lambda pid, number: (sent.append(number), real(pid, number)))
    lasting.start(tmp_path, {})
    begun(lasting)
    for _ in range(3):
        lasting.stop()
    assert sent == [signal.SIGINT]
    wait_for(lambda: lasting.state in ("done", "stopped"))


def test_what_was_stopped_before_it_began_never_does(lasting, tmp_path):
    lasting.stop()
    assert lasting.state == "stopped"
    lasting.start(tmp_path, {})
    Queue(tmp_path / "jobs", tmp_path).advance()
    assert lasting.state == "stopped"
    assert lasting.log() == ""


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    for kind in ("training_images", "control_images"):
        (tmp_path / "work/data" / kind).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (64, 64), (number, 9, 9)).save(tmp_path / "work/data" / kind / f"p{number}.png")
            (tmp_path / f"work/data/training_images/p{number}.txt").write_text("x")
    return Workspace.opened(tmp_path / "work")


class Idle(Queue):
    """Starts nothing."""

    def advance(self) -> None:
        pass


def test_nobodys_config_is_overwritten_or_deleted(workspace):
    queue = Idle(workspace.own / "jobs", workspace.root)
    text = starting.draft(workspace, Library(workspace)["data"], {"model": "qflux-small", "name": "mine"})
    own = workspace.root / "mine.yaml"
    own.write_text("# written by hand\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml is there already, and says something else"):
        starting.start(workspace, queue, text, "cpu")
    assert own.read_text() == "# written by hand\n"
    own.unlink()
    job = starting.start(workspace, queue, text, "cpu")
    other = text.replace("rank: 16", "rank: 8")
    with pytest.raises(Exception, match="is queued already"):
        starting.start(workspace, queue, other, "cpu")
    assert own.read_text() == text, "what is queued stays as it was"
    job.stop()
    starting.start(workspace, queue, other, "cpu")  # it is the studio's own, and nothing was trained with it
    assert own.read_text() == other

    # A run of a terminal has the same name, in another folder.
    elsewhere = workspace.root / "outputs/mine"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.yaml").write_text(text.replace("output_dir: runs", "output_dir: outputs"))
    assert "output_dir: outputs" in starting.duplicate(workspace, "outputs/mine")
    starting.delete(workspace, queue, "outputs/mine")
    assert own.exists(), "another run's"
    queue.of_run("runs/mine").stop()
    own.write_text(other + "# and a word of mine\n")
    starting.delete(workspace, queue, "runs/mine")
    assert own.exists(), "somebody has changed it"


def test_a_table_that_is_there_is_not_written_again(tmp_path):
    for kind in ("before", "after"):
        (tmp_path / "mine" / kind).mkdir(parents=True)
        Image.new("RGB", (64, 64), "teal").save(tmp_path / "mine" / kind / "a.png")
    (tmp_path / "mine/prompt.txt").write_text("x")
    workspace = Workspace.opened(tmp_path)
    (found,) = Library(workspace).sets()
    assert found["samples"] == 1, "in a folder of the folder"
    (table,) = tmp_path.glob("*.pairs.jsonl")
    changed = json.dumps(json.loads(table.read_text()) | {"prompt": "by hand"}) + "\n"
    table.write_text(changed)
    data = Library(workspace)[found["id"]]
    assert data.window(0, 5, "", "")["rows"][0]["prompt"] == "by hand"
    assert table.read_text() == changed


def test_pictures_outside_of_the_folder_are_not_shown(tmp_path):
    (tmp_path / "work").mkdir()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "secret.png")
    Image.new("RGB", (64, 64), "teal").save(tmp_path / "work/a.png")
    rows = "path_target,path_control,prompt\na.png,../secret.png,x\n"
    (tmp_path / "work/table.csv").write_text(rows)
    workspace = Workspace.opened(tmp_path / "work")
    data = Library(workspace)["table.csv"]
    assert data.picture("a.png", "target", large=False)
    with pytest.raises(Exception, match="is outside of"):
        data.picture("a.png", "control0", large=False)
