"""Without another wish an image is edited at the size of the reference pipeline; what has no effect is told."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from published import photo
from qflux.adapters.files import FILE_NAME
from qflux.cli import main
from qflux.config import load_config
from qflux.main import main as module_main
from qflux.models import get_family
from qflux.models.loading import save_checkpoint
from qflux.sampling.predict import Edit, Predictor
from qflux.training.trainer import Trainer


def run(*arguments: str, entry=main) -> int:
    with pytest.raises(SystemExit) as ended:
        entry(list(arguments))
    return int(ended.value.code or 0)


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


@pytest.mark.parametrize("option", [["--height", "64", "--width", "64"], ["--prompt-2", "x"], ["--image", "x.png"]])
def test_options_of_one_edit_need_its_prompt(option, config_file, capsys):
    assert run("predict", "--config", config_file("predict.prompts=[a]"), *option) == 2
    assert "needs a --prompt" in capsys.readouterr().err
