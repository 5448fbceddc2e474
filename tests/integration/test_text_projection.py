"""Prompts in the cache as the transformer's frozen projection leaves them: smaller, and training sees the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_samples import REFERENCES
from qflux.adapters.files import read_adapter
from qflux.commands import Trainer
from qflux.config import load_config
from qflux.data.encoded import COMPLETE
from qflux.demo.data import write_data_set
from qflux.errors import CacheError
from qflux.models.loading import save_checkpoint, transformer_layer
from qflux.models.projection import projection_weights

LAYER = "context_embedder"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("projection")
    reference = REFERENCES["flux2"]
    save_checkpoint(reference.components(0), folder / "model", reference.pipeline_name)
    write_data_set(folder / "data", 6, 0)
    settings = {
        "family": "flux2",
        "output_dir": str(folder / "runs"),
        "model": {"pretrained": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"path": str(folder / "data"), "batch_size": 3, "held_out": {"count": 1}},
        "lora": {"rank": 4},
        "optimizer": {"init_args": {"lr": 0.01}},
        "train": {"max_train_steps": 3, "preflight": False, "caption_dropout": 0.3},
        "validation": {
            "images": 1,
            "num_inference_steps": 2,
            "true_cfg_scale": 2.0,
            "edits": [{"prompt": "make it red", "images": [str(next((folder / "data/control_images").glob("*.png")))]}],
        },
    }
    settings["data"]["processor"] = {"multi_resolutions": ["64*64", "96*96"]}
    return lambda *overrides: load_config(settings, overrides)


def text_widths(trainer: Trainer) -> set[int]:
    return {sample.embeddings.load(COMPLETE).text.tokens.shape[-1] for sample in trainer.samples().training}


def test_training_on_projected_prompts_learns_what_training_on_whole_ones_does(recipe):
    adapters = []
    for projects in ("true", "false"):
        trainer = Trainer(recipe(f"cache.project_text={projects}", f"run_name=project-{projects}"))
        trainer.cache()
        assert text_widths(trainer) == {64 if projects == "true" else 48}
        adapters.append(read_adapter(trainer.fit().adapter).tensors)
    for name, tensor in adapters[0].items():
        assert (tensor - adapters[1][name]).abs().max() <= 1e-5


@pytest.mark.slow
def test_without_a_cache_the_same_is_learnt(recipe):
    cached = Trainer(recipe("run_name=from-cache"))
    cached.cache()
    live = Trainer(recipe("run_name=live", "cache.use_cache=false"))
    left, right = (read_adapter(trainer.fit().adapter).tensors for trainer in (cached, live))
    assert all((left[name] - right[name]).abs().max() <= 1e-6 for name in left)


@pytest.mark.parametrize(
    "override",
    [
        "train.method=full",
        f"lora.target_modules=[to_q, {LAYER}]",
        "model.quantization=int8",
        "cache.project_text=false",
    ],
)
def test_what_comes_before_is_cached_where_the_projection_trains_or_is_another(recipe, override):
    assert recipe().projects_text
    assert not recipe(override).projects_text


def test_entries_are_of_the_projections_weights_and_of_no_other_weights(recipe, tmp_path):
    config = recipe()
    first = Trainer(config)
    first.cache()
    model = Path(shutil.copytree(config.model.pretrained, tmp_path / "model"))
    (file,) = (model / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    for name, is_known in (("proj_out.weight", True), (f"{LAYER}.weight", False)):
        tensors[name] += 1
        save_file(tensors, file, metadata={"format": "pt"})
        other = Trainer(recipe(f"model.pretrained={model}", f"cache.path={first.store.root}"))
        assert (other.cache().new_entries == 0) == is_known


def test_a_layer_is_read_from_the_file_that_holds_it(recipe, tmp_path):
    config = recipe()
    whole = transformer_layer(config.model, LAYER)
    assert set(whole) == {"weight"}
    transformer = Trainer(config).pretrained.transformer()
    transformer.save_pretrained(tmp_path / "model/transformer", max_shard_size="100KB")
    shards = list((tmp_path / "model/transformer").glob("*.safetensors"))
    assert len(shards) > 1
    settings = config.model.model_copy(update={"pretrained": str(tmp_path / "model")})
    assert torch.equal(transformer_layer(settings, LAYER)["weight"], whole["weight"])


def test_a_folder_of_embeddings_says_how_it_was_made(recipe, tmp_path):
    made = Trainer(recipe("cache.project_text=false", f"cache.path={tmp_path / 'made'}"))
    made.cache()
    options = stored(made)
    with pytest.raises(CacheError, match=r"kept as it was encoded.*\n.*set cache.project_text: false"):
        Trainer(recipe(*options, "run_name=stored")).fit()
    Trainer(recipe(*options, "run_name=stored", "cache.project_text=false")).fit()


def stored(made: Trainer) -> list[str]:
    """Train on what another trainer has encoded, without its images."""
    source = f"data.sources=[{{type: cache, path: {made.store.root}}}]"
    return ["data.path=null", "data.held_out=null", source, "train.caption_dropout=0", "validation={images: 0}"]


def test_projected_embeddings_are_for_the_transformer_that_projected_them(recipe, tmp_path):
    made = Trainer(recipe(f"cache.path={tmp_path / 'made'}", "train.caption_dropout=0", "validation.images=0"))
    made.cache()
    Trainer(recipe(*stored(made), "run_name=stored-projected")).fit()
    for override in ("train.method=full", f"lora.target_modules=[to_q, {LAYER}]", "cache.project_text=false"):
        with pytest.raises(CacheError, match=r"needs it before.*\n.*encode it again with cache.project_text: false"):
            Trainer(recipe(*stored(made), override, "run_name=other")).fit()
    model = Path(shutil.copytree(recipe().model.pretrained, tmp_path / "model"))
    (file,) = (model / "transformer").glob("*.safetensors")
    save_file({n: t + (n == f"{LAYER}.weight") for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(CacheError, match="projected by another transformer"):
        Trainer(recipe(*stored(made), f"model.pretrained={model}", "run_name=other")).fit()


@pytest.mark.slow
def test_a_run_may_go_on_with_or_without_projection(recipe):
    """It is how the text is kept, not which samples there are."""
    for first, then in (("true", "false"), ("false", "true")):
        name = f"run_name=changes-{first}"
        for steps, projects in ((2, first), (4, then)):
            trainer = Trainer(recipe(name, f"cache.project_text={projects}", f"train.max_train_steps={steps}"))
            trainer.cache()
            result = trainer.fit()
        assert result.resumed_from == 2


def test_weights_that_are_quantized_or_square_are_not_projected_by(recipe, tmp_path):
    config = recipe()
    model = Path(shutil.copytree(config.model.pretrained, tmp_path / "model"))
    (file,) = (model / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    for weight in (torch.zeros(64 * 24, 1, dtype=torch.uint8), torch.zeros(64, 64)):
        save_file({**tensors, f"{LAYER}.weight": weight}, file, metadata={"format": "pt"})
        assert projection_weights(recipe(f"model.pretrained={model}")) is None
    assert projection_weights(config) is not None
