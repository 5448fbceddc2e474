"""Every command in README and docs runs.

Each page is followed from top to bottom in a folder where a reader's files lie: recipes, data, a photo. Recipes and new
configs are made small before they are used: a tiny checkpoint, two steps. Nothing else is changed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from qflux.cli import main
from qflux.config.reader import parse_yaml
from qflux.demo.data import write_data_set
from qflux.demo.run import demo_config, run_demo
from qflux.main import main as mode_main
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from worlds import HANG

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EXCLUDED = {
    "make demo": ".ci/run runs it",
    "torchrun --nnodes": "needs two machines",
    "accelerate launch": "needs several GPUs; tests/invariance starts the same processes",
    "qflux cache migrate": "needs a cache of another version; tests/unit/test_stored.py migrates one",
    "python -m pytest": "is what `make test` does",
    "make torture": "tests/integration/test_torture.py runs its short part",
    "PYTHONPATH=tests:tests/parity .venv/bin/python -m torture": "as above",
}
"""Commands that are not run here, by how they begin, and why."""


def blocks(page: Path) -> list[str]:
    """The fenced shell blocks of a page."""
    return re.findall(r"^```(?:bash|sh|shell|console)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def shrunk(config: Path, model: Path) -> None:
    """The same config for a tiny model and two steps."""
    values = parse_yaml(config.read_text())
    values["model"] |= {"pretrained": str(model), "dtype": "float32", "device": "cpu", "max_sequence_length": None}
    values["model"].pop("quantization", None)
    if values["family"] == "flux-kontext":
        values["model"]["max_sequence_length"] = 64
    train = values.setdefault("train", {})
    train |= {"max_train_steps": 2, "lr_warmup_steps": 0, "lr_scheduler": "constant", "compile": False}
    train |= {"gradient_checkpointing": False, "distributed": "ddp"}
    values["predict"] = values.get("predict", {}) | {"num_inference_steps": 2, "preprocessing": "config"}
    values["data"].setdefault("processor", {})["multi_resolutions"] = ["96*96", "128*128"]
    config.write_text(yaml.safe_dump(values))


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Where a reader sits."""
    desk = tmp_path_factory.mktemp("reader")
    family = get_family("flux-kontext")
    save_checkpoint(family.tiny(0), desk / "tiny", family.pipeline)
    shutil.copytree(ROOT / "recipes", desk / "recipes")
    shutil.copytree(ROOT / "examples", desk / "examples")
    write_data_set(desk / "my_data", 6, 0)
    (desk / "data").symlink_to(desk / "my_data")
    for recipe in (desk / "recipes").glob("flux-kontext*.yaml"):
        shrunk(recipe, desk / "tiny")
    demo = desk / "recipes/demo.yaml"
    demo.write_text(re.sub(r"max_train_steps: \d+", "max_train_steps: 2", demo.read_text()))
    Image.effect_noise((128, 96), 60).convert("RGB").save(desk / "photo.jpg")
    for number in range(3):
        for kind in ("raw", "done"):
            (desk / "my_pairs" / "shots").mkdir(parents=True, exist_ok=True)
            noise = Image.effect_noise((96, 64), 30 + number + 40 * (kind == "done")).convert("RGB")
            noise.save(desk / "my_pairs" / "shots" / f"{number}_{kind}.png")
    table = "".join(f"shots/{n}_raw.png,shots/{n}_done.png,shots/{n}_done.png,develop it\n" for n in range(3))
    (desk / "my_table.csv").write_text(f"first,second,final,words\n{table}")
    (desk / "shots").symlink_to(desk / "my_pairs" / "shots")
    (desk / "edits.csv").write_text("image,prompt\nphoto.jpg,make it snow\n")
    (desk / "my_edits").mkdir()
    for name in ("cat", "cat_wanted"):
        shutil.copy(desk / "photo.jpg", desk / f"my_edits/{name}.jpg")
    (desk / "my_edits/cat.txt").write_text("make it snow")
    (desk / "face_seg.yaml").write_text(
        "trainer: FluxKontext\nmodel: {pretrained_model_name_or_path: x/y, lora: {r: 8, lora_alpha: 8}}\n"
        "data: {init_args: {dataset_path: [my_data]}, batch_size: 2}\nlogging: {tags: [a]}\n"
    )
    here = Path.cwd()
    os.chdir(desk)
    try:
        few = ["train.max_train_steps=2", "validation.num_inference_steps=2", "predict.num_inference_steps=2"]
        run_demo(demo_config(Path("runs/demo"), few), lambda *_: None)
        shared = ["--config", "recipes/flux-kontext.yaml", "--set", "data.path=my_data"]
        for command in (["cache", *shared], ["fit", *shared], ["init", "my_data", "--output", "my.yaml"]):
            qflux(command, desk)
        lora = ["--lora", "runs/flux-kontext/adapter"]
        kohya = ["--format", "comfyui", "--output", "kohya-lora.safetensors"]
        qflux(["export", *shared[:2], *lora, *kohya], desk)
        qflux(["cache", "--config", "my.yaml"], desk)
        for name in ("mine", "rank-64"):
            qflux(["fit", "--config", "my.yaml", "--set", f"run_name={name}"], desk)
        shutil.copy("my.yaml", "mine.yaml")
    finally:
        os.chdir(here)
    return desk


def qflux(arguments: list[str], desk: Path) -> None:
    """A command of qflux, in this process: importing torch takes longer than most of them."""
    if arguments[0] == "init":
        arguments = [*arguments, "--force"]
    # A folder is trained on with settings of its own, and one page trains for longer.
    if (arguments[0] == "train" and not arguments[1].endswith(".yaml")) or "train.max_train_steps=20" in arguments:
        for setting in ("train.max_train_steps=2", "train.lr_warmup_steps=0", "validation.num_inference_steps=1"):
            arguments = [*arguments, "--set", setting]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code, arguments
    if arguments[0] == "init":
        output = arguments[arguments.index("--output") + 1] if "--output" in arguments else "qflux.yaml"
        shrunk(desk / output, desk / "tiny")


def run(command: str, desk: Path) -> None:
    words = shlex.split(command, comments=True)
    if {"fit", "train"} & set(
        words
    ) and "recipes/flux-kontext.yaml" in words:  # another page has finished it, perhaps on one process
        shutil.rmtree(desk / "runs/flux-kontext", ignore_errors=True)
    if words[0] == "qflux":
        qflux(words[1:], desk)
    elif words[:3] == ["python", "-m", "qflux.main"]:
        with pytest.raises(SystemExit) as ended:
            mode_main(words[3:])
        assert not ended.value.code, command
    else:
        programs = Path(sys.executable).parent
        words = [word if word != "8" else "2" for word in words]  # processes: there are two cores
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            words, cwd=desk, env=environment, capture_output=True, text=True, timeout=HANG, check=False
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p) and p.name != "README.zh.md"], ids=lambda page: page.name
)
def test_every_command_of_a_page_runs(page, desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    for block in blocks(page):
        for command in commands(block):
            if not any(command.startswith(beginning) for beginning in EXCLUDED):
                run(command, desk)


def test_both_readmes_have_the_same_commands():
    english, chinese = ([commands(block) for block in blocks(ROOT / name)] for name in ("README.md", "README.zh.md"))
    assert english == chinese


def test_every_exclusion_is_needed():
    said = [command for page in PAGES for block in blocks(page) for command in commands(block)]
    unused = [beginning for beginning in EXCLUDED if not any(command.startswith(beginning) for command in said)]
    assert unused == []


def test_every_page_is_in_the_navigation_and_every_public_name_exists():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if page.parent.name == "docs" and page.name not in navigation] == []
    import qflux

    text = (ROOT / "docs/api.md").read_text()
    for name in re.findall(r"`(\w+Trainer|Trainer|load_config)", text):
        assert getattr(qflux, name)
    for module, name in re.findall(r"`(files|attach|export)\.(\w+)\(", text):
        assert hasattr(__import__(f"qflux.adapters.{module}", fromlist=[name]), name)
