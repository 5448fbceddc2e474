"""Without another wish an image is edited at the size of the reference pipeline; what has no effect is told."""

from __future__ import annotations

import json

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from helpers import run
from published import photo
from qflux.adapters.files import FILE_NAME
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.errors import ConfigError, DataError
from qflux.main import main as module_main
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.sampling.predictor import Edit, Predictor


def predictor(name: str, tmp_path, *overrides: str) -> Predictor:
    family = get_family(name)
    save_checkpoint(family.tiny(0), tmp_path / "model", family.pipeline)
    settings = {
        "family": name,
        "model": {"pretrained": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": "nowhere", "processor": {"target_pixels": "64*64"}},
        "predict": {"num_inference_steps": 2},
    }
    return Trainer(load_config(settings, overrides)).predictor()


@pytest.mark.parametrize(
    ("name", "photo_size", "expected"),
    [
        ("flux-kontext", (1200, 900), (1184, 880)),
        ("flux-kontext", (500, 2000), (672, 1568)),
        ("flux-kontext", (64, 64), (1024, 1024)),
        ("qwen-image-edit", (1200, 900), (1184, 896)),
        ("qwen-image-edit-plus", (900, 1200), (896, 1184)),
    ],
)
def test_the_default_size_is_the_reference_pipelines_for_that_photo(name, photo_size, expected, tmp_path):
    """(width, height). The pipelines' own rules, asked of them directly."""
    size, (transform,) = predictor(name, tmp_path).prepare.transforms([photo_size])
    assert size == transform.size == expected[::-1]
    ratio = photo_size[0] / photo_size[1]
    if name == "flux-kontext":
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        assert expected == min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)[1:]
    else:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        assert expected == calculate_dimensions(1024 * 1024, ratio)[:2]


@pytest.mark.slow
def test_a_large_edit_equals_the_pipelines_own_call(tmp_path):
    """Nothing but the photo and the prompt is given, on both sides; Kontext's output size has to be asked for."""
    edit = predictor("flux-kontext", tmp_path, "model.max_sequence_length=64")
    image = photo(600, 450)
    (ours,) = edit([Edit((image,), "make it snow", seed=3)])
    parts = get_family("flux-kontext").tiny(0)
    stock = diffusers.FluxTransformer2DModel.from_config(parts.transformer.config)
    stock.load_state_dict(parts.transformer.state_dict())
    pipeline = diffusers.FluxKontextPipeline(**{**vars(parts), "transformer": stock})
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 16, 110, 148, generator=torch.Generator().manual_seed(3))
    (theirs,) = pipeline(
        image=image,
        prompt="make it snow",
        height=880,
        width=1184,
        num_inference_steps=2,
        guidance_scale=3.5,
        max_sequence_length=64,
        latents=pipeline._pack_latents(noise, 1, 16, 110, 148),
    ).images
    assert ours.size == theirs.size == (1184, 880)
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


def test_other_sizes_come_on_request(tmp_path):
    configured = predictor("flux-kontext", tmp_path, "predict.preprocessing=config")
    assert configured.prepare.transforms([(1200, 900)])[0] == (48, 64)
    extreme = predictor("flux-kontext", tmp_path, "predict.preprocessing=config", "data.processor.max_aspect_ratio=2")
    extreme.prepare.transforms([(1000, 100)])  # the limit is the training's


@pytest.mark.parametrize("preprocessing", ["config", "pipeline"])
@pytest.mark.parametrize("size", [(96, 160), (128, 64), (1024, 768)])
def test_the_image_to_edit_follows_the_size_asked_for(preprocessing, size, tmp_path):
    """Whatever the size, a place in the result is the same place in the image to edit; further images keep theirs."""
    made = predictor("flux-kontext", tmp_path, f"predict.preprocessing={preprocessing}")
    plain = made.prepare.transforms([(300, 200), (80, 90)])
    target, (first, second) = made.prepare.transforms([(300, 200), (80, 90)], size)
    assert target == first.size == size
    assert second == plain[1][1]
    if size[0] < 1000:
        prepared = made.prepare(Edit((photo(300, 200),), "x", size=size))
        assert prepared.shapes.targets == prepared.shapes.controls == ((1, size[0] // 16, size[1] // 16),)


def test_an_own_size_of_the_image_to_edit_stays_what_a_lora_has_learnt(tmp_path):
    made = predictor("flux-kontext", tmp_path, "predict.preprocessing=config", "data.processor.controls_pixels=[1024]")
    target, (first,) = made.prepare.transforms([(200, 200)], (128, 128))
    assert (target, first.size) == ((128, 128), (32, 32))


@pytest.mark.parametrize("photo_size", [(101, 67), (48, 130), (64, 64), (9, 20)])
def test_a_result_can_be_as_large_as_its_input(photo_size, tmp_path):
    made = predictor("flux-kontext", tmp_path, "predict.preprocessing=config", "predict.size=input")
    _, (transform,) = made.prepare.transforms([photo_size], "input")
    assert transform.fit == "stretch", "nothing is cut off"
    (image,) = made([Edit((photo(*photo_size),), "x", size="input")], steps=1)
    assert image.size == photo_size
    assert made.prepare.tokens([photo_size], "input") == 2 * (transform.size[0] // 16) * (transform.size[1] // 16)
    with pytest.raises(DataError, match="there is none"):
        made.prepare.transforms([], "input")


def test_what_a_size_cuts_off_is_told_once(tmp_path, caplog):
    made = predictor("flux-kontext", tmp_path, "predict.preprocessing=config")
    for _ in range(2):
        made.prepare.transforms([(300, 100)], (128, 128))
    (told,) = [record.message for record in caplog.records if "cut off" in record.message]
    assert "300x100" in told
    assert "67% of it is cut off" in told
    made.prepare.transforms([(300, 200)], (128, 192))
    assert len([record for record in caplog.records if "cut off" in record.message]) == 1


def test_sizes_come_from_the_command_the_config_and_the_list(config_file, tmp_path, capsys):
    path = config_file()
    photo(101, 67).save(tmp_path / "p.png")
    edit = ["predict", path, "--image", str(tmp_path / "p.png"), "--prompt", "x"]
    for given, expected in (
        (["--height", "48", "--width", "80"], (80, 48)),
        (["--size", "48x80"], (80, 48)),
        (["--size", "input"], (101, 67)),
        (["--set", "predict.size=[64, 32]"], (32, 64)),
    ):
        assert run(*edit, *given, "--output", str(tmp_path / "o.png")) == 0
        assert Image.open(tmp_path / "o.png").size == expected
    rows = [{"image": "p.png", "prompt": "x", "name": "a", "size": "input"}]
    rows += [{"image": "p.png", "prompt": "x", "name": "b", "height": 32, "width": 48}]
    rows += [
        {"image": "p.png", "prompt": "x", "name": "c"},
        {"image": "p.png", "prompt": "x", "name": "d", "size": "big"},
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    jobs = [
        "predict",
        path,
        "--jobs",
        str(tmp_path / "jobs.jsonl"),
        "--size",
        "64x64",
        "--output",
        str(tmp_path / "out"),
    ]
    capsys.readouterr()
    assert run(*jobs) == 2
    assert "1 of 4 jobs can't be done; the other 3 are in" in " ".join(capsys.readouterr().err.split())
    sizes = {name: Image.open(tmp_path / "out" / f"{name}.png").size for name in "abc"}
    assert sizes == {"a": (101, 67), "b": (48, 32), "c": (64, 64)}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(rows[-1]))
    assert run(*jobs) == 2
    assert "no job can be done: - d" in " ".join(capsys.readouterr().err.split())
    assert run(*edit, "--size", "48x80", "--height", "48", "--width", "80") == 2
    assert run(*edit, "--size", "50x80") == 2


def test_a_lora_may_be_named_by_a_string_and_a_long_image_is_edited_with_it(trained, config):
    trainer = Trainer(config("predict.num_inference_steps=1"))
    (as_text,) = trainer.predict([[photo(400, 60)]], ["x"], lora=str(trained.parent))
    (as_path,) = trainer.predict([[photo(400, 60)]], ["x"], lora=trained)
    assert as_text.width > 3 * as_text.height, "the limit on aspect ratios is the training's"
    assert np.array_equal(as_text, as_path)


@pytest.fixture
def trained(config, tmp_path):
    """A LoRA that was trained at small sizes."""
    return Trainer(config("train.max_train_steps=1")).fit().adapter


def test_a_lora_is_used_at_the_sizes_it_was_trained_at_or_at_the_pipelines(trained, config):
    from qflux.adapters.attach import Weighted

    assert trained.name == FILE_NAME
    sizes = {}
    for choice in ("lora", "pipeline"):
        made = Trainer(config(f"predict.preprocessing={choice}")).predictor([Weighted(trained)])
        sizes[choice] = made.prepare.transforms([(1200, 900)])[0]
    assert sizes["pipeline"] == (880, 1184)
    assert sizes["lora"][0] * sizes["lora"][1] <= 160 * 160


@pytest.mark.parametrize(
    ("name", "settings", "negative", "told"),
    [
        ("flux-kontext", [], "ugly", "the negative prompt has no effect: predict.true_cfg_scale is 1"),
        ("flux-kontext", ["predict.true_cfg_scale=2"], "ugly", None),
        ("flux-kontext", [], None, None),
        ("qwen-image", [], "ugly", None),
        ("qwen-image", ["predict.true_cfg_scale=3"], None, "predict.true_cfg_scale 3 has no effect without a negative"),
        ("qwen-image", ["predict.true_cfg_scale=1"], "ugly", "the negative prompt has no effect"),
    ],
)
def test_guidance_without_an_effect_is_told_once(name, settings, negative, told, tmp_path, caplog):
    predict = predictor(name, tmp_path, "predict.preprocessing=config", *settings)
    images = () if name == "qwen-image" else (photo(64, 64),)
    for _ in range(2):
        predict([Edit(images, "x", negative_prompt=negative)])
    found = [record.message for record in caplog.records if "has no effect" in record.message]
    assert len(found) == (0 if told is None else 1)
    assert told is None or found[0].startswith(told)


@pytest.fixture
def config_file(config, data_set, tmp_path):
    def write(*overrides: str) -> str:
        settings = config("predict.preprocessing=config", "predict.num_inference_steps=1", *overrides)
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings.dump()))
        return str(tmp_path / "config.yaml")

    return write


def test_the_module_form_predicts_what_the_config_says(config_file, data_set, tmp_path):
    images = sorted((data_set / "control_images").glob("scene_00?.png"))[:3]
    out = tmp_path / "out"
    path = config_file(
        "predict.prompts=['make it red', 'make it blue', 'make it green']",
        f"predict.images=[{', '.join(map(str, images))}]",
        f"predict.output={out}",
    )
    assert run("--config", path, "--mode", "predict", "--batch_size", "1", entry=module_main) == 0
    made = sorted(file.name for file in out.glob("*.png") if file.name != "contact_sheet.png")
    assert made == [f"{number}-{image.stem}.png" for number, image in enumerate(images, start=1)]
    assert "make it blue" in Image.open(out / made[1]).text["prompt"]


def test_one_prompt_is_for_all_images(config_file, data_set, tmp_path):
    images = sorted((data_set / "control_images").glob("scene_00?.png"))[:2]
    path = config_file(
        "predict.prompts=red", f"predict.images={[str(i) for i in images]}", f"predict.output={tmp_path / 'o'}"
    )
    assert run("predict", "--config", path) == 0
    assert len(list((tmp_path / "o").glob("*-scene*.png"))) == 2


def test_prompts_and_images_that_do_not_pair_are_named(config_file, data_set, tmp_path, capsys):
    image = str(next((data_set / "control_images").glob("*.png")))
    path = config_file("predict.prompts=[a, b, c]", f"predict.images=[{image}, {image}]")
    assert run("predict", "--config", path) == 2
    assert "3 prompts and images for 2" in capsys.readouterr().err


def test_without_a_prompt_anywhere_the_ways_are_named(config_file, capsys):
    assert run("predict", "--config", config_file()) == 2
    assert "predict.prompts" in capsys.readouterr().err


def test_a_batch_size_on_the_command_line_replaces_a_token_budget(config_file, tmp_path):
    path = config_file("data.batch_size=null", "data.max_tokens=2000", "train.max_train_steps=1")
    assert run("--config", path, "--mode", "fit", "--batch_size", "2", entry=module_main) == 0
    saved = yaml.safe_load((tmp_path / "runs/run/config.yaml").read_text())
    assert (saved["data"]["batch_size"], saved["data"]["max_tokens"]) == (2, None)


def test_the_originals_options_are_understood(config_file, tmp_path, capsys):
    path = config_file("train.max_train_steps=1")
    assert run("--config", path, "--cache", entry=module_main) == 0
    assert run("--config", path, entry=module_main) == 0
    (checkpoint,) = (tmp_path / "runs/run/checkpoints").glob("step-*")
    more = ["--set", "train.max_train_steps=2"]
    assert run("--config", path, "--resume", str(checkpoint), *more, entry=module_main) == 0
    assert "--resume is not needed" in capsys.readouterr().err
    assert run("--config", path, "--resume", str(tmp_path), entry=module_main) == 2
    assert "no checkpoint of qflux" in capsys.readouterr().err
    live = ["--set", "run_name=live"]
    assert run("--config", path, "--fit-no-cache", *live, entry=module_main) == 0
    assert not yaml.safe_load((tmp_path / "runs/live/config.yaml").read_text())["cache"]["use_cache"]
    assert run("--config", path, "--cache", "--mode", "fit", entry=module_main) == 2


def test_the_configs_lora_is_used_whatever_names_the_edit(config_file, trained, data_set, tmp_path):
    image = str(next((data_set / "control_images").glob("*.png")))
    path = config_file(f"predict.lora={trained}")
    output = tmp_path / "edit.png"
    assert run("predict", "--config", path, "--image", image, "--prompt", "x", "--output", str(output)) == 0
    notes = yaml.safe_load(Image.open(output).text["qflux"])
    assert [adapter["name"] for adapter in notes["adapters"]] == [FILE_NAME]


def test_a_missing_image_is_named_before_anything_is_loaded(config_file, capsys, monkeypatch):
    monkeypatch.setattr("qflux.commands.Trainer.predictor", lambda *_: pytest.fail("the model is loaded"))
    assert run("predict", "--config", config_file(), "--image", "missing.png", "--prompt", "x") == 2
    assert "missing.png" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--prompt-2", "x"], ["--image", "x.png"]])
def test_options_of_one_edit_need_its_prompt(option, config_file, capsys):
    assert run("predict", "--config", config_file("predict.prompts=[a]"), *option) == 2
    assert "needs a --prompt" in capsys.readouterr().err


def test_predictions_from_python_take_any_setting_of_predict(tmp_path):
    family = get_family("qwen-image-edit")
    save_checkpoint(family.tiny(0), tmp_path / "model", family.pipeline)
    settings = {
        "family": family.name,
        "model": {"pretrained": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": "nowhere"},
    }
    asked = {"num_inference_steps": 2, "negative_prompt": "blurry", "true_cfg_scale": 3.0, "seed": 5}
    shared = {"size": (64, 64)}
    configured = Trainer(load_config({**settings, "predict": asked}))
    (expected,) = configured.predict([[photo(64, 64)]], ["red"], **shared)
    plain = Trainer(load_config(settings))
    (found,) = plain.predict([[photo(64, 64)]], ["red"], **shared, **asked)
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    (other,) = plain.predict([[photo(64, 64)]], ["red"], **shared, **{**asked, "num_inference_steps": 3})
    assert not np.array_equal(np.asarray(other), np.asarray(expected))
    with pytest.raises(ConfigError, match=r"predict\.num_inference_steps: .*-1"):
        plain.predict([[photo(64, 64)]], ["red"], num_inference_steps=-1)
    with pytest.raises(ConfigError, match=r"predict\.steps: .*not permitted"):
        plain.predict([[photo(64, 64)]], ["red"], steps=3)
