"""A checkpoint that is not what the config says, or not whole, is named before any of it is used."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from family_samples import REFERENCES
from helpers import run
from published import photo
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.errors import CheckpointError
from qflux.models import get_family
from qflux.models.facts import Described
from qflux.models.loading import save_checkpoint
from qflux.models.registry import families_of
from qflux.start.machine import Machine
from qflux.start.presets import choose_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A tiny checkpoint of every family and variant."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, reference in REFERENCES.items():
        save_checkpoint(reference.components(0), root / name, reference.pipeline_name)
    return {name: root / name for name in REFERENCES}


@pytest.fixture
def klein(checkpoints, tmp_path) -> Path:
    """A checkpoint that may be damaged."""
    return Path(shutil.copytree(checkpoints["flux2"], tmp_path / "model"))


def trainer(checkpoint: Path, data_set: Path, folder: Path, family: str = "flux2") -> Trainer:
    settings = {
        "family": family,
        "output_dir": str(folder / "runs"),
        "model": {"pretrained": str(checkpoint), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(data_set), "batch_size": 2, "processor": {"target_pixels": "64*64"}},
        "train": {"max_train_steps": 1, "preflight": False},
    }
    return Trainer(load_config(settings))


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("flux2", "flux-kontext"),
        ("flux-kontext", "flux2"),
        ("flux3", "flux2"),
        ("qwen-image-2.1", "qwen-image"),
        pytest.param("qwen-image", "qwen-image-2.1", marks=pytest.mark.slow),
        pytest.param("flux2", "flux3", marks=pytest.mark.slow),
        pytest.param("flux2, dev", "qwen-image", marks=pytest.mark.slow),
        pytest.param("qwen-image-edit", "flux2", marks=pytest.mark.slow),
        ("qwen-image-edit", "qwen-image-edit-plus"),  # one class of transformer, another pipeline
        ("qwen-image-edit-plus, 2511", "qwen-image-edit"),
    ],
)
def test_a_checkpoint_of_another_family_is_an_error_that_names_the_right_one(
    checkpoints, data_set, tmp_path, name, family, capsys
):
    wanted = REFERENCES[name].family
    for command in ("cache", "fit", "predictor"):
        with pytest.raises(CheckpointError, match=rf"(?s)is not of the family {family}.*set family: {wanted}\."):
            getattr(trainer(checkpoints[name], data_set, tmp_path, family), command)()
    config = tmp_path / "c.yaml"
    config.write_text(f"family: {family}\nmodel: {{pretrained: '{checkpoints[name]}'}}\ndata: {{path: {data_set}}}\n")
    assert run("check", str(config), "--json") == 2
    found = json.loads(capsys.readouterr().out)["checks"]
    told = [item for item in found if item["what"] == "model"]
    assert [(item["state"], item["remedy"]) for item in told] == [("error", f"set family: {wanted}.")]


def test_a_hub_id_of_another_family_is_known_without_the_hub(data_set, tmp_path):
    with pytest.raises(CheckpointError, match=r"(?s)FLUX.2-klein-base-9B is not of the family flux-kontext.*flux2"):
        trainer(Path("black-forest-labs/FLUX.2-klein-base-9B"), data_set, tmp_path, "flux-kontext").cache()


def test_a_checkpoint_without_an_index_may_be_any_family_with_its_transformer(checkpoints, data_set, tmp_path):
    model = Path(shutil.copytree(checkpoints["qwen-image-edit-plus, 2511"], tmp_path / "model"))
    (model / "model_index.json").unlink()
    trainer(model, data_set, tmp_path, "qwen-image-edit-plus").pretrained.require_family()


def test_a_checkpoint_whose_controls_see_only_themselves_is_refused(klein, data_set, tmp_path):
    change(klein / "model_index.json", _class_name="Flux2KleinKVPipeline")
    for command in ("cache", "fit", "predictor"):
        with pytest.raises(CheckpointError, match="its controls see only themselves"):
            getattr(trainer(klein, data_set, tmp_path), command)()


def test_a_transformer_that_does_not_fit_the_checkpoint_is_named(klein, checkpoints, data_set, tmp_path):
    own = Path(shutil.copytree(klein / "transformer", tmp_path / "other"))
    change(own / "config.json", joint_attention_dim=96)
    for folder, message in (
        (own, "takes text of 96 channels, and model.pretrained gives 48"),
        (checkpoints["flux-kontext"] / "transformer", "holds a FluxTransformer2DModel"),
    ):
        other = trainer(klein, data_set, tmp_path)
        settings = other.config.model.model_copy(update={"transformer": folder})
        other = Trainer(other.config.model_copy(update={"model": settings}))
        for command in ("cache", "fit", "predictor"):
            with pytest.raises(CheckpointError, match=message):
                getattr(other, command)()


def test_every_checkpoint_tells_its_own_family(checkpoints):
    machine = Machine(None, 0.0)
    for name, folder in checkpoints.items():
        assert choose_model(str(folder), None, machine, has_controls=True).family == REFERENCES[name].family
    assert families_of(Described("somebody/anything", transformer="UNet2DConditionModel")) == []
    assert families_of(Described("black-forest-labs/flux.2-DEV")) == ["flux2"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "t5"}, "is of the type 't5'"),
        ({"hidden_size": 8}, r"28 layers and gives 24 channels; the transformer needs 27 layers or more and 48"),
        ({"num_hidden_layers": 20}, r"has 20 layers"),
    ],
    ids=["type", "width", "depth"],
)
def test_a_text_encoder_that_does_not_fit_is_told_before_it_loads(klein, data_set, tmp_path, values, message):
    change(klein / "text_encoder" / "config.json", **values)
    with pytest.raises(CheckpointError, match=message):
        trainer(klein, data_set, tmp_path).cache()


@pytest.mark.parametrize("name", ["bn.running_mean", "bn.running_var"])
def test_a_missing_batch_norm_statistic_is_named(klein, data_set, tmp_path, name):
    (file,) = (klein / "vae").glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"vae lacks 1 weights, {name} first"):
        trainer(klein, data_set, tmp_path).cache()


def test_a_missing_counter_of_a_batch_norm_does_not_matter(klein, data_set, tmp_path):
    (file,) = (klein / "vae").glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}, file)
    trainer(klein, data_set, tmp_path).pretrained.encoder("image")


def test_training_a_distilled_checkpoint_is_warned_of_with_what_to_use(klein, data_set, tmp_path, caplog, capsys):
    plain = trainer(klein, data_set, tmp_path)
    plain.cache()
    with caplog.at_level(logging.WARNING):
        plain.fit()
    assert "distilled" not in caplog.text
    change(klein / "model_index.json", is_distilled=True)
    distilled = trainer(klein, data_set, tmp_path)
    assert distilled.pretrained.facts.num_inference_steps == 4
    with caplog.at_level(logging.WARNING):
        distilled.fit()
    assert "was distilled to make images in a few steps" in caplog.text
    assert "train black-forest-labs/FLUX.2-klein-base-" in caplog.text
    config = tmp_path / "c.yaml"
    config.write_text(
        f"family: flux2\nmodel: {{pretrained: black-forest-labs/FLUX.2-klein-4B}}\ndata: {{path: {data_set}}}\n"
    )
    run("check", str(config), "--json")
    found = json.loads(capsys.readouterr().out)["checks"]
    assert any(item["state"] == "warning" and "FLUX.2-klein-base-4B instead" in item["remedy"] for item in found)


def test_a_checkpoint_of_unknown_size_is_a_variant_by_its_pipeline():
    facts = get_family("flux2").facts
    dev = facts.of(Described("/somewhere", pipeline="Flux2Pipeline", width=64))
    assert (dev.title, dev.guidance_scale) == ("FLUX.2 dev", 4.0)
    assert facts.of(Described("/somewhere", pipeline="Flux2KleinPipeline", width=3072)).title == "FLUX.2 klein base 4B"
    assert facts.of(Described("black-forest-labs/flux.2-klein-9b")).distilled_from == facts.hub_id
    assert facts.of(Described("/without/index", embeds_guidance=True, width=64)).title == "FLUX.2 dev"
    assert facts.of(Described("/modular", pipeline="Flux2ModularPipeline", width=6144)).title == "FLUX.2 dev"
    assert facts.of(Described("/modular", embeds_guidance=False, width=3072)).title == "FLUX.2 klein base 4B"


def test_the_card_of_a_lora_names_its_checkpoints_pipeline(checkpoints, data_set, tmp_path):
    dev = trainer(checkpoints["flux2, dev"], data_set, tmp_path)
    dev.cache()
    card = dev.fit().adapter.parent / "README.md"
    assert "from diffusers import Flux2Pipeline\n" in card.read_text()


def test_guidance_that_a_model_is_not_told_is_warned_of(checkpoints, data_set, tmp_path, caplog):
    for name, is_told in (("flux2", False), ("flux2, dev", True)):
        config = trainer(checkpoints[name], data_set, tmp_path).config
        config = load_config({**config.dump(), "predict": {"guidance_scale": 9, "num_inference_steps": 1}})
        caplog.clear()
        Trainer(config).predict([[photo(64, 64)]], ["x"])
        assert ("predict.guidance_scale 9 has no effect" in caplog.text) == (not is_told)
