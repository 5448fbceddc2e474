"""`qflux predict --jobs`: every image made once, what is wrong named, the rest done."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from qflux.adapters.attach import Weighted
from qflux.cli import main
from qflux.commands import Trainer
from qflux.config import Config
from qflux.config.sampling import PredictSettings
from qflux.errors import DataError
from qflux.sampling.jobs.gallery import Gallery, read_notes
from qflux.sampling.jobs.lists import read_jobs
from qflux.sampling.jobs.run import JobRun
from qflux.sampling.predictor import Edit
from worlds import HANG, World

SIZES = [(128, 96), (96, 96), (160, 128), (96, 160), (200, 100), (64, 64)]


def picture(size: tuple[int, int], seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(values).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, size in enumerate(SIZES):
        picture(size, number).save(folder / f"i{number}.png")
    return folder


def write_jobs(folder: Path, rows: list[dict]) -> Path:
    (folder / "jobs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "jobs.jsonl"


@pytest.fixture
def settings(config) -> Config:
    return config("predict.num_inference_steps=2", "predict.preprocessing=config")


@pytest.fixture(scope="module")
def lora(tmp_path_factory, checkpoint, data_set, cache) -> Path:
    from conftest import make_config

    trained = make_config(
        checkpoint, data_set, cache, tmp_path_factory.mktemp("runs"), "optimizer.init_args={lr: 0.03}", "lora.alpha=10"
    )
    return Trainer(trained).fit().adapter


def run(settings: Config, arguments: list[str], tmp_path: Path) -> int:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings.dump()))
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--config", str(file), *arguments])
    return int(ended.value.code)


def mixed_rows(count: int) -> list[dict]:
    return [
        {"name": f"job{n}", "images": [f"i{(n + k) % 6}.png" for k in range(n % 4)], "prompt": f"edit {n}", "seed": n}
        for n in range(count)
    ]


def test_a_list_of_mixed_sizes_and_control_counts_equals_one_by_one_whatever_the_order(
    settings, images, lora, tmp_path
):
    rows = mixed_rows(6)
    outputs = []
    for order, tokens in ((1, 10**6), (-1, 10**6), (1, 1)):
        folder = tmp_path / f"out{len(outputs)}"
        jobs = write_jobs(images, rows[::order])
        arguments = ["--jobs", str(jobs), "--output", str(folder), "--lora", str(lora)]
        assert run(settings, [*arguments, "--set", f"predict.max_tokens={tokens}"], tmp_path) == 0
        outputs.append({row["name"]: np.asarray(Image.open(folder / f"{row['name']}.png"), dtype=int) for row in rows})
    for name, image in outputs[0].items():
        for other in outputs[1:]:
            assert np.abs(image - other[name]).max() <= 1, name  # a rounding of 255ths

    predictor = Trainer(settings).predictor([Weighted(lora)])
    edits = [
        Edit(tuple(Image.open(images / name) for name in row["images"]), row["prompt"], seed=row["seed"])
        for row in rows
    ]
    together = predictor.latents(edits)
    for edit, (tokens, _) in zip(edits, together, strict=True):
        ((alone, _),) = predictor.latents([edit])
        assert (tokens - alone).abs().max() <= 1e-5


def test_images_say_how_they_were_made_and_there_is_a_contact_sheet(settings, images, lora, tmp_path, capsys):
    jobs = write_jobs(images, mixed_rows(3))
    out = tmp_path / "out"
    assert (
        run(settings, ["--jobs", str(jobs), "--output", str(out), "--lora", str(lora), "--lora-scale", "0.5"], tmp_path)
        == 0
    )
    notes = read_notes(out / "job2.png")
    assert (notes["prompt"], notes["seed"], notes["num_inference_steps"]) == ("edit 2", 2, 2)
    assert notes["adapters"][0]["weight"] == 0.5
    assert Image.open(out / "job2.png").info["prompt"] == "edit 2"
    assert min(Image.open(out / "contact_sheet.png").size) > 200
    assert "3 images made" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_a_folder_and_a_table_are_lists_too(settings, images, tmp_path, kind):
    if kind == "folder":
        (images / "i0.txt").write_text("make it red")
        shutil.copy(images / "i1.png", images / "i0_control_1.png")
        shutil.copy(images / "i1.png", images / "i0_mask.png")  # of a data set; no image to edit
        jobs = images
    else:
        jobs = images / "jobs.csv"
        jobs.write_text('image,image_1,prompt,height,width\ni0.png,i1.png,"make it red, now",64,80\ni2.png,,,,\n')
    listed = read_jobs(jobs, prompt="anything")
    assert [len(job.images) for job in listed.jobs][:2] == [2, 1]
    assert listed.jobs[1].prompt == "anything"
    out = tmp_path / "out"
    assert run(settings, ["--jobs", str(jobs), "--output", str(out), "--prompt", "anything"], tmp_path) == 0
    if kind == "csv":
        assert Image.open(out / "i0.png").size == (80, 64)
    assert len(list(out.glob("i*.png"))) == len(listed.jobs)


def test_bad_jobs_are_named_and_the_others_run(settings, images, tmp_path, capsys):
    (images / "broken.png").write_bytes((images / "i2.png").read_bytes()[:200])
    (images / "text.png").write_text("no image")
    rows = [
        *mixed_rows(2),
        {"name": "missing", "images": ["nowhere.png"], "prompt": "x"},
        {"name": "truncated", "images": ["broken.png"], "prompt": "x"},
        {"name": "unreadable", "images": ["text.png"], "prompt": "x"},
        {"name": "speechless", "images": ["i0.png"]},
        {"name": "odd", "images": ["i0.png"], "prompt": "x", "height": 100, "width": 64},
        {"name": "absurd", "images": ["i0.png"], "prompt": "x", "height": 160000, "width": 16},
        {"name": "huge", "images": ["i0.png"], "prompt": "x", "height": 8192, "width": 8192},
        {"name": "half", "images": ["i0.png"], "prompt": "x", "height": 64},
        {"name": "seedy", "images": ["i0.png"], "prompt": "x", "seed": "one"},
        {"name": "../escape", "images": ["i0.png"], "prompt": "x"},
        {"name": "twin", "images": ["i0.png"], "prompt": "x"},
        {"name": "twin", "images": ["i1.png"], "prompt": "x"},
        {"name": "numb", "images": ["i0.png"], "prompt": 7},
        {"name": "n" * 300, "images": ["i0.png"], "prompt": "x"},
        {"name": "torn \ud800", "images": ["i0.png"], "prompt": "x"},
        {"name": "half a letter", "images": ["i0.png"], "prompt": "x\udcff"},
        {"name": "stranger", "images": ["~nobody-here/x.png"], "prompt": "x"},
        {"name": "endless", "images": ["x" * 5000], "prompt": "x"},
        {"name": "extra", "images": ["i0.png"], "prompt": "x", "colour": "red"},
        {"name": "blank", "images": ["i0.png"], "prompt": "  "},
        {"name": "foreign", "images": ["i0.png"], "prompt": "x"},
    ]
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(images / "i0.png", out / "foreign.png")
    jobs = write_jobs(images, rows)
    jobs.write_text(jobs.read_text() + "{not json\n" + "[" * 100_000 + "\n")
    assert run(settings, ["--jobs", str(jobs), "--output", str(out)], tmp_path) == 2
    assert sorted(file.name for file in out.glob("*.png")) == [
        "contact_sheet.png",
        "foreign.png",
        "job0.png",
        "job1.png",
    ]
    said = capsys.readouterr().err
    for name in ("truncated", "unreadable", "odd", "absurd", "huge", "twin", "foreign"):
        assert f"{name}: " in said
    for name, reason in (
        ("missing (line 3)", "nowhere.png"),
        ("speechless (line 6)", "no prompt"),
        ("half (line 10)", "go together"),
        ("seedy (line 11)", "whole number"),
        ("line 12", "escape"),
        ("line 16", "300 bytes"),
        ("line 17", "characters that are not Unicode"),
        ("half a letter (line 18)", "characters that are not Unicode"),
        ("stranger (line 19)", "can't be opened"),
        ("endless (line 20)", "can't be opened"),
        ("extra (line 21)", "'colour' means nothing"),
        ("blank (line 22)", "no prompt"),
        ("line 24", "not valid JSON"),
        ("line 25", "not valid JSON"),
    ):
        assert any(name in part and reason in part for part in said.splitlines()), name
    assert "23 of 25 jobs" in said
    assert "Traceback" not in said


def predict_all(config: Config, rank: int, jobs: Path, out: Path, lora: Path) -> None:
    original = Gallery.add

    def counted(self, batch, images):
        with (out.parent / "made.txt").open("a") as log:
            log.writelines(f"{name}\n" for name in images)
        original(self, batch, images)

    Gallery.add = counted
    listed = read_jobs(jobs)
    predictor = Trainer(config).predictor([Weighted(lora)])
    JobRun(predictor, out, {"adapters": [str(lora)]}, PredictSettings(max_tokens=700))(
        listed.jobs, None, lambda *_: None
    )


@pytest.mark.slow
def test_kill_9_in_a_run_of_fifty_jobs_makes_each_image_once_with_the_same_bytes(settings, images, lora, tmp_path):
    jobs = write_jobs(images, mixed_rows(50))
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    World(predict_all, settings, 1, tmp_path / "notes", jobs, tmp_path / "whole" / "out", lora).finish()

    out, moments, kills = tmp_path / "killed" / "out", random.Random(0), 0
    for goal in (0, 3, 9, 14, 22, 31, 40, 47):
        world = World(predict_all, settings, 1, tmp_path / f"notes-{goal}", jobs, out, lora)
        deadline = time.monotonic() + HANG
        while world.is_alive and len(list(out.glob("job*.png"))) < goal:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.2))
        kills += world.is_alive
        world.kill()
    assert kills >= 6, "it ended too early to prove anything"
    World(predict_all, settings, 1, tmp_path / "last", jobs, out, lora).finish()

    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole" / "out").iterdir()}
    assert len(whole) == 51
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole
    made = (tmp_path / "killed" / "made.txt").read_text().split()
    again = [name for name in made if made.count(name) > 1]
    assert len(set(again)) < 25, "only a batch that was being written when the process died is made again"
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    World(predict_all, settings, 1, tmp_path / "idle", jobs, out, lora).finish()
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before


def test_an_image_made_from_something_else_is_not_overwritten(settings, images, tmp_path):
    jobs = write_jobs(images, mixed_rows(1))
    out = tmp_path / "out"
    assert run(settings, ["--jobs", str(jobs), "--output", str(out)], tmp_path) == 0
    before = (out / "job0.png").read_bytes()
    assert run(settings, ["--jobs", str(jobs), "--output", str(out), "--seed", "0", "--steps", "3"], tmp_path) == 2
    assert (out / "job0.png").read_bytes() == before


def test_a_batch_that_was_complete_is_only_moved(tmp_path):
    gallery = Gallery(tmp_path)
    staged = tmp_path / ".unfinished" / "abc"
    torn = tmp_path / ".unfinished" / "def.tmp"
    for folder in (staged, torn):
        folder.mkdir(parents=True)
        picture((32, 32), 1).save(folder / f"{folder.stem}.png")
    Gallery(gallery.folder)
    assert [file.name for file in tmp_path.iterdir()] == ["abc.png"]


def test_the_preprocessing_recorded_in_the_lora_is_applied(config, images, lora):
    """The LoRA was trained at areas up to 160 x 160; another config would make it 64 x 64."""
    other = config('data.processor.multi_resolutions=["64*64"]', "predict.num_inference_steps=1")
    image = picture((300, 300), 1)
    for preprocessing, side in (("lora", 160), ("config", 64)):
        chosen = other.predict.model_copy(update={"preprocessing": preprocessing})
        (result,) = Trainer(other.model_copy(update={"predict": chosen})).predict([[image]], ["x"], lora=lora)
        assert result.size == (side, side)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_one_prediction_says_how_it_was_made_in_every_format(settings, images, tmp_path, suffix):
    out = tmp_path / f"x{suffix}"
    arguments = ["--image", str(images / "i0.png"), "--prompt", "größer", "--seed", "5", "--output", str(out)]
    assert run(settings, arguments, tmp_path) == 0
    notes = read_notes(out)
    assert (notes["prompt"], notes["seed"], notes["family"]) == ("größer", 5, "flux-kontext")


@pytest.mark.parametrize(
    ("text", "prompts", "problem"),
    [
        ('image,prompt\ni0.png,"make it\nsnow"\n', ["make it\nsnow"], None),
        ("image,prompt\ni0.png,make it snow\u2028now\n", ["make it snow\u2028now"], None),
        ("image,prompt\ni0.png,make it snow, please\ni1.png,x\n", ["x"], "more values than columns"),
        ('image,prompt\ni0.png,x\ni1.png,"open\ni2.png,y\n', ["x"], "can't be read"),
        ("image,prompt,negative_prompt\ni0.png,x,\n", ["x"], None),
    ],
)
def test_tables_are_read_as_they_are_written(images, text, prompts, problem):
    (images / "jobs.csv").write_text(text, encoding="utf-8")
    found = read_jobs(images / "jobs.csv")
    assert [job.prompt for job in found.jobs] == prompts
    assert all(job.negative_prompt is None for job in found.jobs)
    assert (problem in found.problems[0]) if problem else not found.problems


def test_a_folder_says_what_it_leaves_out(images):
    shutil.copy(images / "i0.png", images / "i1.jpg")
    shutil.copy(images / "i0.png", images / "lost_control_1.png")
    (images / "i2.txt").write_bytes("heiß".encode("latin-1"))
    (images / "i3.txt").write_bytes(b"\xef\xbb\xbfmake it red\n")
    found = read_jobs(images, "default")
    assert {job.name: job.prompt for job in found.jobs} == {
        "i0": "default",
        "i3": "make it red",
        "i4": "default",
        "i5": "default",
    }
    assert [problem.partition(":")[0] for problem in found.problems] == ["i1.jpg", "i2.png", "lost_control_1.png"]


def test_a_photo_with_an_orientation_is_turned_once(settings, images, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture((96, 64), 1).save(images / "e.jpg", exif=exif)
    out = tmp_path / "o.png"
    assert run(settings, ["--image", str(images / "e.jpg"), "--prompt", "x", "--output", str(out)], tmp_path) == 0
    width, height = Image.open(out).size
    assert width < height


def test_nothing_of_the_users_is_overwritten(settings, images, tmp_path, capsys):
    photo = images / "i0.png"
    before = photo.read_bytes()
    for output in (photo, images / "i1.png"):
        assert run(settings, ["--image", str(photo), "--prompt", "x", "--output", str(output)], tmp_path) == 2
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(photo, out / "contact_sheet.png")
    jobs = write_jobs(images, mixed_rows(1))
    assert run(settings, ["--jobs", str(jobs), "--output", str(out)], tmp_path) == 2
    assert photo.read_bytes() == (out / "contact_sheet.png").read_bytes() == before
    assert "not made by qflux" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["model.dtype=bfloat16", "data.processor={target_size: [64, 64]}"])
def test_images_of_other_settings_are_not_taken_for_done(settings, images, tmp_path, change, capsys):
    jobs = write_jobs(images, mixed_rows(2))
    shared = ["--jobs", str(jobs), "--output", str(tmp_path / "out")]
    assert run(settings, shared, tmp_path) == 0
    assert run(settings, shared, tmp_path) == 0
    assert "2 were there already" in capsys.readouterr().out
    assert run(settings, [*shared, "--set", change], tmp_path) == 2
    assert "made from something else" in capsys.readouterr().err


def test_a_job_that_fails_late_does_not_repeat_the_others(settings, images, tmp_path, monkeypatch):
    (images / "broken.png").write_bytes((images / "i2.png").read_bytes()[:-400])
    jobs = write_jobs(images, [*mixed_rows(2), {"name": "torn", "images": ["broken.png"], "prompt": "x"}])
    shared = ["--jobs", str(jobs), "--output", str(tmp_path / "out")]
    assert run(settings, shared, tmp_path) == 2
    draws = []
    monkeypatch.setattr("qflux.sampling.predictor.Predictor.draw", lambda self, prepared, **_: draws.append(prepared))
    assert run(settings, shared, tmp_path) == 2
    assert draws == []


def test_further_images_are_counted_from_wherever_somebody_begins(images):
    (images / "jobs.csv").write_text("image_1,image_0,prompt\ni1.png,i0.png,x\n")
    (job,) = read_jobs(images / "jobs.csv").jobs
    assert [path.name for path in job.images] == ["i0.png", "i1.png"]


def test_an_unknown_column_is_an_error_with_the_known_ones(tmp_path):
    (tmp_path / "jobs.csv").write_text("picture,prompt\nx.png,y\n")
    with pytest.raises(DataError, match="a column 'picture' that means nothing here"):
        read_jobs(tmp_path / "jobs.csv")


@pytest.mark.slow
def test_exporting_from_the_command_line(settings, lora, tmp_path, capsys, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings.dump()))
    shared = ["export", "--config", str(file), "--lora", str(lora)]

    def export(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main([*shared, *arguments])
        return int(ended.value.code)

    assert export("--format", "comfyui", "--output", str(tmp_path / "e" / "c.safetensors")) == 0
    assert export("--format", "merged", "--output", str(tmp_path / "m")) == 0
    said = capsys.readouterr().out
    assert "read back and compared" in said
    assert "of the change is lost to rounding" in said
    assert (tmp_path / "e" / "README.md").read_text().startswith("---\nbase_model")
    there, back = tmp_path / "e" / "c.safetensors", tmp_path / "e" / "d.safetensors"
    with pytest.raises(SystemExit) as ended:
        main(["export", "--config", str(file), "--lora", str(there), "--format", "diffusers", "--output", str(back)])
    assert not ended.value.code
    trained = lora / "pytorch_lora_weights.safetensors" if lora.is_dir() else lora
    assert back.read_bytes() == trained.read_bytes(), "there and back, to the byte"
    assert export("--format", "merged", "--output", str(tmp_path / "m")) == 0, "an earlier merge is replaced"
    base = settings.model.pretrained
    for output in (base, str(tmp_path)):
        assert export("--format", "merged", "--output", output) == 2
    assert export("--format", "comfyui", "--output", str(lora)) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("MY PROJECT")
    (tmp_path / "mine" / "secret.txt").write_text("secret")
    shared_out = ["--output", str(tmp_path / "mine" / "c.safetensors")]
    capsys.readouterr()
    assert export("--format", "comfyui", *shared_out, "--push", "me/mine", "--dry-run") == 0
    assert (tmp_path / "mine" / "README.md").read_text() == "MY PROJECT"
    assert "secret" not in capsys.readouterr().out

    image = picture((96, 96), 3)
    merged = settings.model_copy(
        update={"model": settings.model.model_copy(update={"pretrained": str(tmp_path / "m")})}
    )
    (first,) = Trainer(settings).predict([[image]], ["x"], lora=tmp_path / "e" / "c.safetensors")
    (second,) = Trainer(merged).predict([[image]], ["x"])
    (third,) = Trainer(settings).predict([[image]], ["x"], lora=lora)
    assert np.array_equal(np.asarray(first), np.asarray(third))
    assert np.abs(np.asarray(second, dtype=int) - np.asarray(third, dtype=int)).max() <= 1

    assert export("--push", "me/mine", "--dry-run", "--output", str(tmp_path / "p" / "x.safetensors")) == 0
    assert "would upload x.safetensors" in capsys.readouterr().out
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert export("--push", "me/mine", "--output", str(tmp_path / "p" / "x.safetensors")) == 2
    assert "HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_TOPSECRET\r\x01")
    assert export("--push", "me/mine", "--output", str(tmp_path / "p" / "x.safetensors")) == 2
    assert "TOPSECRET" not in "".join(capsys.readouterr())
    assert export("--output", str(tmp_path / "x.bin")) == 2
    assert export("--lora-scale", "0.5") == 2
