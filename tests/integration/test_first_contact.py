"""Somebody's own pictures, one command: `qflux train FOLDER`, on a CPU, with nothing but what ships."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from PIL import Image

from helpers import run
from qflux.config import load_config

PHOTOS = sorted((Path(__file__).parents[2] / "examples" / "day-to-night" / "day").glob("*.jpg"))
QUICK = ["--set", "train.max_train_steps=2", "--set", "train.lr_warmup_steps=0", "--set", "train.preflight=false"]
QUICK += ["--set", "validation.num_inference_steps=1", "--set", "validation.images=1"]


def pair(number: int) -> tuple[Image.Image, Image.Image]:
    """A photograph by day and by night, small."""
    day, night = (
        Image.open(Path(str(PHOTOS[number]).replace("/day/", f"/{kind}/"))).convert("RGB") for kind in ("day", "night")
    )
    for image in (day, night):
        image.thumbnail((80, 80))
    return day, night


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def before_and_after(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(day, root / "before" / f"p{number}.png")
    save(night, root / "after" / f"p{number}.jpg")
    text(root / "after" / f"p{number}.txt", "turn day into night")


def day_and_night(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(day, root / "day" / f"照片 {number}.png")
    save(night, root / "night" / f"照片 {number}.png")


def ends_of_names(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(day, root / f"p{number}_a.png")
    save(night, root / f"p{number}_b.png")


def folder_per_sample(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(day, root / "scenes" / f"s{number}" / "input.png")
    save(night, root / "scenes" / f"s{number}" / "output.png")
    text(root / "scenes" / f"s{number}" / "prompt.txt", f"night, please ({number})")


def two_controls(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(day, root / "control_1" / f"p{number}.png")
    save(pair(0)[1], root / "control_2" / f"p{number}.png")
    save(night, root / "target" / f"p{number}.png")
    save(Image.new("L", night.size, 255), root / "masks" / f"p{number}.png")
    text(root / "prompt.txt", "as in the second picture")


def semicolons(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(day, root / "pics" / f"d{number}.png")
    save(night, root / "pics" / f"n{number}.png")
    new = not (root / "list.csv").exists()
    with (root / "list.csv").open("a", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerows([["Original", "Edited file_name", "Instruction"]] * new)
        writer.writerow([f"pics/d{number}.png", f"pics/n{number}.png", "night; dark"])


def json_list(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(day, root / f"d{number}.png")
    save(night, root / f"n{number}.png")
    known = json.loads((root / "data.json").read_text()) if (root / "data.json").exists() else []
    row = {"source_image": [f"d{number}.png"], "edited_image": f"n{number}.png", "caption": "夜晚"}
    (root / "data.json").write_text(json.dumps([*known, row]))


def own_layout(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(day, root / "control_images" / f"p{number}.png")
    save(night, root / "training_images" / f"p{number}.png")
    text(root / "training_images" / f"p{number}.txt", "turn day into night")


def captions(root: Path, number: int, day: Image.Image, night: Image.Image) -> None:
    save(night, root / "set" / f"p{number}.png")
    text(root / "set" / f"p{number}.txt", f"a night, number {number}")


Layout = Callable[[Path, int, Image.Image, Image.Image], None]
LAYOUTS: list[Layout] = [
    before_and_after,
    day_and_night,
    ends_of_names,
    folder_per_sample,
    two_controls,
    semicolons,
    json_list,
    own_layout,
    captions,
]


def written(layout: Layout, root: Path, count: int = 30) -> Path:
    root.mkdir()
    for number in range(count):
        layout(root, number, *pair(number))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_thirty_photos_in_any_layout_train_with_one_command(layout, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = written(layout, tmp_path / "my photos")
    assert run("train", str(root), *QUICK) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "30 samples" in said
    assert "the small model that ships with qflux" in said
    config = load_config(tmp_path / "my-photos.yaml")
    run_dir = tmp_path / "runs" / "my-photos"
    assert (run_dir / "report.html").is_file()
    assert (run_dir / "adapter" / "pytorch_lora_weights.safetensors").is_file()
    assert (config.model.dtype, config.train.compile) == ("float32", False)
    assert config.loss.use_mask_loss == (layout is two_controls)
    ledger = (run_dir / "ledger.jsonl").read_text()
    assert ".pairs.jsonl:" not in ledger, "samples are called by their images"
    assert len([line for line in ledger.splitlines() if '"kind": "sample"' in line]) == 27
    images = next(json.loads(line)["images"] for line in ledger.splitlines() if '"kind": "sample"' in line)
    assert len(images) == {two_controls: 3, captions: 1}.get(layout, 2)


@pytest.mark.slow
def test_what_train_says_last_can_be_typed(tmp_path, monkeypatch, capsys):
    import shlex

    monkeypatch.chdir(tmp_path)
    written(before_and_after, tmp_path / "d", 12)
    assert run("train", "d", *QUICK) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("→ "))
    photo = tmp_path / "photo.png"
    Image.new("RGB", (101, 67), "teal").save(photo)
    typed = [str(photo) if word == "PHOTO" else word for word in command[1:]]
    assert typed[-1] == "turn day into night"
    assert run(*typed, "--size", "input", "--steps", "1", "--output", "made.png") == 0
    assert Image.open("made.png").size == (101, 67)


def test_the_same_command_goes_on_and_notices_new_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = written(before_and_after, tmp_path / "d", 12)
    assert run("train", "d", *QUICK) == 0
    capsys.readouterr()
    assert run("train", "d", *QUICK) == 0
    said = capsys.readouterr().out
    assert "going on with d.yaml" in said
    assert "continued from step 2" in said
    before_and_after(root, 20, *pair(20))
    (root / "after" / "p0.jpg").unlink()
    (root / "before" / "p0.png").unlink()
    longer = ["--set", "train.max_train_steps=4", *QUICK[2:]]
    assert run("train", "d", *longer) == 2
    said = capsys.readouterr()
    assert "d has changed since: 1 new, 1 gone; the same command with --force takes it in" in said.out
    assert run("train", "d", "--force", *longer) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "1 new (after/p20.jpg); 1 gone (after/p0.jpg)" in said
    assert "--accept-data-change" in said
    assert run("train", "d", "--accept-data-change", *longer) == 0
    assert "4 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_command_goes_on_with_its_options_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(day_and_night, tmp_path / "1e3", 12)  # the name of a folder may look like a number
    command = ["train", "1e3", "--control", "night", "--target", "day", "--prompt", "make it day", *QUICK]
    assert run(*command) == 0
    (row, *_) = (json.loads(line) for line in (tmp_path / "1e3.pairs.jsonl").read_text().splitlines())
    assert (row["path_control"].split("/")[0], row["prompt"]) == ("night", "make it day")
    for again in (command, ["train", "1e3", *QUICK], ["train", "../" + tmp_path.name + "/1e3", *QUICK]):
        capsys.readouterr()
        assert run(*again) == 0
        said = capsys.readouterr().out
        assert "going on with 1e3.yaml" in said
        assert "has changed" not in said
    assert run("train", "1e3", "--prompt", "something else", *QUICK) == 2
    assert "--prompt would change it" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "1e3.yaml").unlink()  # as if killed before it was written
    assert run(*command) == 0


def test_check_looks_at_own_edits_and_at_the_start(config, tmp_path, capsys):
    settings = config("lora.init_from=nowhere", "validation.edits=[{prompt: x, images: nope.png}]")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings.dump()))
    assert run("check", str(tmp_path / "c.yaml"), "--json") == 2
    found = json.loads(capsys.readouterr().out)["checks"]
    wrong = {item["what"]: item["detail"] for item in found if item["state"] == "error"}
    assert "nope.png can't be read" in wrong["edits"]
    assert "no LoRA file" in wrong["start"]
    (settings.run_dir / "checkpoints" / "step-00000001").mkdir(parents=True)
    run("check", str(tmp_path / "c.yaml"), "--json")
    assert "start" not in {item["what"] for item in json.loads(capsys.readouterr().out)["checks"]}, "it goes on"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is nothing at nowhere"),
        (["d", "--control", "before"], "--control needs --target"),
        (["d", "--force", "--model", "small", "--family", "qwen-image"], "is of the family flux-kontext"),
        (["d", "--columns", "target"], "is no ROLE=NAME"),
        (["d", "--prompt", "x", "--output", "other.yaml"], "was written for"),
        (["other.yaml", "--prompt", "x"], "--prompt is for data"),
        (["d", "--prompt", "x"], "--prompt would change it"),
        (["c.yaml"], "no config file at c.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_not_be_trained_is_said_at_once(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(before_and_after, tmp_path / "d", 2)
    text(tmp_path / "d.yaml", f"# Written by qflux for {tmp_path / 'd'}:\nfamily: flux-kontext\n")
    text(tmp_path / "other.yaml", f"# Written by qflux for {tmp_path / 'other'}:\nfamily: flux-kontext\n")
    assert run("train", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_train_takes_a_config_too(config, tmp_path, capsys):
    settings = config("train.max_train_steps=1")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings.dump()))
    assert run("train", str(tmp_path / "c.yaml")) == 0
    assert "1 steps" in capsys.readouterr().out


@pytest.mark.parametrize("form", [["FILE"], pytest.param(["--config", "FILE"], marks=pytest.mark.slow)])
def test_a_config_is_understood_bare_and_as_an_option_by_every_command(form, config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = config("train.max_train_steps=1", "predict.num_inference_steps=1", "predict.preprocessing=config")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings.dump()))
    given = [word.replace("FILE", "c.yaml") for word in form]
    photo = tmp_path / "photo.png"
    Image.new("RGB", (64, 64), "teal").save(photo)
    for command in (
        ["check", *given],
        ["inspect", *given],
        ["cache", *given],
        ["cache", "stats", *given],
        ["cache", "verify", *given],
        ["fit", *given],
        ["predict", *given, "--image", str(photo), "--prompt", "x", "--lora", str(settings.run_dir / "adapter")],
        ["export", *given, "--format", "comfyui"],
        ["report", *given],
        ["cache", "gc", "--dry-run", *given],
    ):
        assert run(*command) == 0, (command, capsys.readouterr())
    capsys.readouterr()
    assert run("cache", "--set", "cache.batch_size=2", *given) == 0
    assert run("cache", "--set", "run_name=x.yaml", *given) == 0
    assert run("cache", "stats", "c.yaml", "--config", "d.yaml") == 2
    capsys.readouterr()
    for command in ("check", "fit", "cache verify"):
        assert run(*command.split()) == 2
        assert "config" in capsys.readouterr().err
    assert run("fit", "c.yaml", "--config", "d.yaml") == 2
    assert "two configs" in capsys.readouterr().err


def test_report_leaves_out_what_is_no_run(config, tmp_path, monkeypatch, capsys):
    from qflux.commands import Trainer

    monkeypatch.chdir(tmp_path)
    Trainer(config("train.max_train_steps=1", f"cache.path={tmp_path / 'runs' / 'cache'}")).cache()
    Trainer(config("train.max_train_steps=1", f"cache.path={tmp_path / 'runs' / 'cache'}")).fit()
    assert run("report", "runs/cache", "runs/run", "--output", "r.html") == 0
    assert "runs/cache is left out" in capsys.readouterr().out
    assert run("report", "runs/cache") == 2


def test_init_drops_no_control_folder_and_prints_sizes_that_pictures_have(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = [(100, 40), (40, 90), (64, 64)]
    for number, size in enumerate(sizes):
        for folder in ("control_1", "control_2", "target"):
            save(Image.new("RGB", size, (number * 80, 10, 10)), tmp_path / "d" / folder / f"p{number}.png")
    (tmp_path / "d" / "target" / "p2.png").write_bytes(b"nothing")
    save(Image.new("RGB", (60, 60)), tmp_path / "d" / "target" / "p3.png")
    assert run("init", "d") == 0
    said = capsys.readouterr().out
    assert "2 samples, 40x90 to 100x40, 2 control images each" in said
    assert "can't be used: target/p2.png" in said
    assert "rows.jsonl" not in said
    assert shutil.which("nvidia-smi") or "qflux-small" in (tmp_path / "qflux.yaml").read_text()
