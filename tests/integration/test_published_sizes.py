"""Edits of 1024 x 1024 pixels, five controls, published limits: every family, every command."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image

from published import photo, published, save_published
from qflux.cli import main
from qflux.data.encoded import Prompt, TextLimit
from qflux.errors import DataError
from qflux.models import FAMILIES, get_family

EDITS = [name for name, family in FAMILIES.items() if family.controls[1] != 0]


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 0


def views(name: str, images: list[Image.Image]) -> tuple[Image.Image, ...]:
    """The images as the family's text encoder sees them at 1024 x 1024."""
    from qflux.data.images.sizes import ImageProcessor

    family = get_family(name)
    processor = ImageProcessor(step=family.size_multiple)
    seen = []
    for index, image in enumerate(images):
        view = family.prompt_view(index, image.size, processor.target(*image.size))
        seen += [view(image)] if view else []
    return tuple(seen)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("name", EDITS)
def test_words_are_limited_and_images_are_not(name, count):
    parts = published(name)
    images = views(name, [photo(1024, 1024, seed) for seed in range(count)])
    words = "make it snow"
    limit = get_family(name).facts.max_sequence_length
    encoder = get_family(name).encoder(parts, TextLimit(limit))
    (embedding,) = encoder.encode_text([Prompt(words, images=images)])
    counted = get_family(name).text_counter(parts, TextLimit(limit))(words, [image.size[::-1] for image in images])
    assert counted.used == len(embedding.tokens)
    assert counted.wanted < 100
    if embedding.places:  # images stand in the text, and are no part of it
        assert len(embedding.places) == count
        assert len(embedding.tokens) < 100
    elif images:
        assert len(embedding.tokens) > (1024 if name == "qwen-image-edit" or count == 5 else 100)


@pytest.mark.parametrize(
    ("name", "pipeline", "count"),
    [("qwen-image-edit", "QwenImageEditPipeline", 1), ("qwen-image-edit-plus", "QwenImageEditPlusPipeline", 5)],
)
def test_embeddings_of_large_images_are_the_pipelines(name, pipeline, count):
    parts = published(name)
    images = views(name, [photo(1024, 1024, seed) for seed in range(count)])
    with torch.no_grad():
        expected, _ = getattr(diffusers, pipeline)(**vars(parts)).encode_prompt("make it snow", image=list(images))
    (embedding,) = get_family(name).encoder(parts, TextLimit(1024)).encode_text([Prompt("make it snow", images=images)])
    assert embedding.tokens.shape == expected[0].shape
    assert (embedding.tokens - expected[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("name", [name for name in EDITS if name.startswith("qwen")])
def test_a_long_instruction_is_cut_after_the_images(name):
    parts = published(name)
    images = views(name, [photo(1024, 1024)])
    words = "many words " * 40
    encode = lambda limit: get_family(name).encoder(parts, limit).encode_text([Prompt(words, images=images)])[0]  # noqa: E731
    whole, cut = encode(TextLimit(1024)), encode(TextLimit(20, truncate=True))
    counted = get_family(name).text_counter(parts, TextLimit(20, truncate=True))(words, [i.size[::-1] for i in images])
    assert cut.is_cut
    assert not whole.is_cut
    assert len(cut.tokens) == counted.used
    assert len(whole.tokens) - len(cut.tokens) == counted.wanted - 20 > 0
    assert torch.equal(cut.tokens, whole.tokens[: len(cut.tokens)])
    with pytest.raises(DataError) as error:
        encode(TextLimit(20, most=20))
    assert "max_sequence_length" not in error.value.remedy  # it can't be raised


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_1024_pixel_edit_goes_through_every_command(name, tmp_path: Path, capsys):
    model = save_published(name, tmp_path / "model")
    data = tmp_path / "data"
    takes_controls = get_family(name).controls[1] != 0
    for folder in ("training_images", "control_images"):
        (data / folder).mkdir(parents=True)
    photo(1024, 1024).save(data / "training_images" / "a.png")
    (data / "training_images" / "a.txt").write_text("make it snow")
    if takes_controls:
        photo(1024, 1024, 1).save(data / "control_images" / "a.png")
    config = tmp_path / "config.yaml"
    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"), key=lambda file: (file.stem != name, file))
    config.write_text(next(text for file in recipes if f"\nfamily: {name}\n" in (text := file.read_text())))
    changes = {
        "model.pretrained": model,
        "model.dtype": "float32",
        "model.device": "cpu",
        "output_dir": tmp_path / "runs",
        "data.path": data,
        "data.held_out": "null",
        "train.max_train_steps": 1,
        "train.compile": "false",
        "train.preflight": str(name == "flux-kontext").lower(),  # once is enough: it is a second step of this size
        "predict.num_inference_steps": 2,
    }
    changed = [argument for key, value in changes.items() for argument in ("--set", f"{key}={value}")]
    run("check", str(config), *changed)
    run("cache", "--config", str(config), *changed)
    run("fit", "--config", str(config), *changed)
    adapter = next((tmp_path / "runs").rglob("adapter"))
    image = ["--image", str(data / "control_images" / "a.png")] if takes_controls else []
    output = tmp_path / "edit.png"
    lora = ["--lora", str(adapter), "--output", str(output)]
    run("predict", "--config", str(config), "--prompt", "make it snow", *image, *lora, *changed)
    assert Image.open(output).size == (1024, 1024)
