"""From a folder of somebody's data to a checked config: `qflux init`, `check` and `doctor`."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

from helpers import run
from qflux.config import load_config


def picture(path, size, seed) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise(size, 30 + seed).convert("RGB").save(path)


SIZES = [(128, 96), (96, 128), (160, 160), (200, 120)]


def two_folders(root):
    for number, size in enumerate(SIZES):
        picture(root / "Inputs" / f"p{number}.png", size, number)
        picture(root / "edited_images" / f"p{number}.jpg", size, number + 50)
        (root / "edited_images" / f"p{number}.txt").write_text(f"make it warm {number}")
    return root


def pairs_in_one_folder(root):
    for number, size in enumerate(SIZES):
        picture(root / f"p{number}_before.png", size, number)
        picture(root / f"p{number}_after.png", size, number + 50)
    return root


def table(root):
    lines = ["source_path,edited_path,instruction"]
    for number, size in enumerate(SIZES):
        picture(root / "img" / f"a{number}.png", size, number)
        picture(root / "img" / f"b{number}.png", size, number + 50)
        lines.append(f'img/a{number}.png,img/b{number}.png,"make it warm, {number}"')
    (root / "list.csv").write_text("\n".join(lines) + "\n")
    return root


def json_lines(root):
    table(root)
    rows = [
        {"before": f"img/a{n}.png", "after": f"img/b{n}.png", "caption": f"make it warm {n}"} for n in range(len(SIZES))
    ]
    (root / "list.csv").unlink()
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "rows.jsonl"


def parquet(root):
    datasets = pytest.importorskip("datasets")
    table(root / "raw")
    rows = {
        "source_image": [str(root / "raw" / "img" / f"a{n}.png") for n in range(4)],
        "output_image": [str(root / "raw" / "img" / f"b{n}.png") for n in range(4)],
        "text": ["make it warm"] * 4,
    }
    made = datasets.Dataset.from_dict(rows).cast_column("source_image", datasets.Image())
    made.cast_column("output_image", datasets.Image()).to_parquet(str(root / "data" / "train.parquet"))
    return root / "data"


def own_layout(root, data_set):
    shutil.copytree(data_set, root, dirs_exist_ok=True)
    return root


ORGANISATIONS = {f.__name__: f for f in (two_folders, pairs_in_one_folder, table, json_lines, parquet)}


@pytest.mark.parametrize("organisation", [*ORGANISATIONS, "own_layout"])
def test_init_writes_a_config_that_check_accepts(organisation, tmp_path, data_set, checkpoint, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "data set"
    root.mkdir()
    data = own_layout(root, data_set) if organisation == "own_layout" else ORGANISATIONS[organisation](root)
    given = ["--prompt", "make it warm"] if organisation == "pairs_in_one_folder" else []
    assert run("init", str(data), "--model", str(checkpoint), "--output", "mine.yaml", *given) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "qflux train mine.yaml" in said
    config = load_config(tmp_path / "mine.yaml")
    assert config.run_name == "mine"
    assert run("check", "mine.yaml", "--json", "--set", "model.dtype=float32") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    states = {item["what"]: item["state"] for item in found["checks"]}
    assert states["model"] == states["plan"] == states["optimizer"] == "ok"
    assert states["cache"] == "warning"
    assert not any(item["detail"].endswith(":") for item in found["checks"]), "no list is announced and left out"
    assert any(str(tmp_path / "runs") in item["detail"] for item in found["checks"]), "where relative paths lead"
    assert run("init", str(data), "--output", "mine.yaml") == 2, "an existing config is not replaced"


def test_what_init_writes_trains(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    two_folders(tmp_path / "data")
    assert run("init", "data", "--model", str(checkpoint)) == 0
    shared = ["--config", "qflux.yaml", "--set", "model.dtype=float32", "--set", "train.compile=false"]
    shared += ["--set", "train.max_train_steps=2", "--set", "train.lr_warmup_steps=1"]
    assert run("cache", *shared) == 0
    assert run("fit", *shared) == 0
    assert (tmp_path / "runs/qflux/report.html").is_file()


@pytest.mark.parametrize(
    ("header", "target", "control"),
    [
        ("image,edited_image,prompt", "edited_image", "image"),
        ("image,target,prompt", "target", "image"),
        ("image_path,conditioning_image,text", "image_path", "conditioning_image"),
        ("original_prompt,original_image,edit_prompt,edited_prompt,edited_image", "edited_image", "original_image"),
        ("beforeImage,afterImage,prompt", "afterImage", "beforeImage"),
    ],
)
def test_init_finds_out_which_column_is_which_and_says_so(header, target, control, tmp_path, checkpoint, capsys):
    names = header.split(",")
    picture(tmp_path / "d" / "t.png", (96, 96), 1)
    picture(tmp_path / "d" / "c.png", (96, 96), 2)
    cells = ["t.png" if name == target else "c.png" if name == control else "words" for name in names]
    (tmp_path / "d" / "t.csv").write_text("\n".join([header, *[",".join(cells)] * 3]) + "\n")
    assert run("init", str(tmp_path / "d"), "--model", str(checkpoint), "--output", str(tmp_path / "m.yaml")) == 0
    said = capsys.readouterr().out
    assert f"target is '{target}'" in said
    assert f"control is '{control}'" in said
    columns = load_config(tmp_path / "m.yaml").data.sources[0].columns
    assert (columns.target, columns.control) == (target, control)


def test_nothing_in_a_folder_of_pairs_is_lost_without_a_word(tmp_path, checkpoint, capsys):
    root = two_folders(tmp_path / "d")
    picture(root / "Inputs" / "lonely.png", (64, 64), 1)
    picture(root / "Inputs" / "p0_control_1.png", (64, 64), 2)
    picture(root / "masks" / "p1.png", SIZES[1], 3)
    picture(root / "Inputs" / "p2.webp", SIZES[2], 4)
    (root / "edited_images" / "p3.jpg").write_bytes(b"nothing")
    output = tmp_path / "m.yaml"
    assert run("init", str(root), "--model", str(checkpoint), "--output", str(output)) == 0
    said = capsys.readouterr().out
    for expected in ("lonely", "p2.webp is left aside", "can't be used", "1 or 2 control images"):
        assert expected in said
    config = load_config(output)
    assert config.data.on_bad_sample == "skip"
    assert config.loss.use_mask_loss
    assert run("check", str(output), "--set", "model.dtype=float32") == 0, "a sample that is skipped is no error"
    assert "are skipped" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["123.yaml", "2024-01-01.yaml", "yes.yaml", "null.yaml", "m².yaml", "my conf.yaml"])
def test_any_name_of_a_config_will_do(name, tmp_path, checkpoint):
    root = two_folders(tmp_path / "da\nta x: y")
    assert run("init", str(root), "--model", str(checkpoint), "--output", str(tmp_path / name)) == 0
    load_config(tmp_path / name)


def test_a_failed_init_leaves_nothing_and_force_replaces_only_its_own(tmp_path, checkpoint, capsys):
    root = two_folders(tmp_path / "d")
    for file in (root / "edited_images").glob("*.jpg"):
        file.write_bytes(b"nothing")
    (tmp_path / "m.jsonl").write_text("precious")
    before = sorted(tmp_path.iterdir())
    assert run("init", str(root), "--output", str(tmp_path / "m.yaml")) == 2
    assert sorted(tmp_path.iterdir()) == before
    two_folders(root)
    for _ in range(2):
        assert run("init", str(root), "--output", str(tmp_path / "m.yaml"), "--force") == 0
    assert (tmp_path / "m.jsonl").read_text() == "precious"
    assert run("init", str(root), "--output", str(tmp_path / "x.jsonl")) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: shutil.rmtree(m / "vae"), "has no folder vae/"),
        (lambda m: [f.unlink() for f in (m / "transformer").glob("*.safetensors")], "holds no .safetensors"),
        (lambda m: shutil.rmtree(m / "tokenizer_2"), "tokenizer_2"),
        (lambda m: (m / "transformer/config.json").write_text('{"_class_name": "UNet2DConditionModel"}'), "UNet2D"),
    ],
)
def test_check_knows_a_checkpoint_that_can_not_work(damage, message, tmp_path, checkpoint, data_set, capsys):
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    damage(model)
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {{pretrained: {model}, dtype: float32}}\ndata: {{path: {data_set}}}\n")
    assert run("check", str(config), "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert any(item["state"] == "error" and message in item["detail"] for item in found["checks"])


def test_check_looks_on_when_the_device_is_wrong_and_at_places_that_can_not_be_written(
    tmp_path, checkpoint, data_set, capsys
):
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {{pretrained: {checkpoint}, dtype: float32}}\ndata: {{path: {data_set}}}\n")
    (tmp_path / "file").write_text("")
    changes = ["model.device=cuda:77", f"output_dir={tmp_path / 'file'}"]
    assert run("check", str(config), "--json", *(part for change in changes for part in ("--set", change))) == 2
    found = json.loads(capsys.readouterr().out)
    assert {item["what"] for item in found["checks"] if item["state"] == "error"} == {"device", "disk", "cache"}
    for bad in ("data.path=~nobody9/x", "train.max_train_steps=2020-13-45", "seed=" + "[" * 5000):
        assert run("check", str(config), "--set", bad, "--json") == 2
        assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nowhere", "there is nothing at"),
        (lambda root: root, "no data of a known organisation"),
        (lambda root: (root / "t.csv").write_text("a,b\n1,2\n") and root, "no column looks like the wanted image"),
        (
            lambda root: [(root / n).write_text("target,prompt\n") for n in ("a.csv", "b.csv")] and root,
            "several tables",
        ),
        (lambda root: (root / "x.txt").write_text("x") and root / "x.txt", "neither a folder nor"),
    ],
)
def test_init_says_what_it_does_not_understand(make, message, tmp_path, capsys):
    root = tmp_path / "d"
    root.mkdir()
    assert run("init", str(make(root)), "--output", str(tmp_path / "c.yaml")) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "→" in said
    assert not (tmp_path / "c.yaml").exists()


def test_check_names_everything_that_is_wrong_at_once(tmp_path, data_set, checkpoint, capsys):
    broken = tmp_path / "data"
    shutil.copytree(data_set, broken)
    next(iter((broken / "training_images").glob("*.png"))).write_bytes(b"no image")
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {{pretrained: {checkpoint}, dtype: float32}}\ndata: {{path: {broken}}}\n")
    changes = ["optimizer.class_path=torch.optim.Adamm", "lora.target_modules=[to_x]"]
    assert run("check", str(config), *(part for change in changes for part in ("--set", change))) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    for expected in ("can't be read as an image", "Adamm", "to_x", "3 things are wrong"):
        assert expected in said
    assert run("check", str(config), "--set", f"model.pretrained={tmp_path / 'nowhere'}", "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert {item["what"] for item in found["checks"] if item["state"] == "error"} == {"data", "model"}


def test_doctor_knows_the_machine_and_keeps_the_token_to_itself(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert run("doctor", "--json") == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["packages"]["torch"]
    assert found["hub_token"] is True
    assert "hf_secret" not in text
    assert run("doctor") == 0
    assert "hf_secret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fitt"], "Did you mean 'fit'"),
        (["fit"], "there is no config"),
        (["fit", "--config", "nowhere.yaml"], "no config file at nowhere.yaml"),
        (["check", "nowhere.yaml"], "no config file at nowhere.yaml"),
        (["init", "nowhere"], "there is nothing at nowhere"),
        (["init", ".", "--family", "sdxl"], "--family sdxl is not known"),
        (["report", "nowhere"], "there is no run at nowhere"),
        (["doctor", "--jason"], "No such option"),
        (["--quiet", "--verbose", "doctor"], "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_file_or_option_gives_one_readable_message(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "command", ["", "demo", "init", "check", "inspect", "cache", "fit", "predict", "export", "report", "doctor"]
)
def test_help_reads_well_and_gives_an_example(command, capsys):
    assert run(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert f"qflux {command}".strip() in text.replace("Usage: qflux", "", 1)
