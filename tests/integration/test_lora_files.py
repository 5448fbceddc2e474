"""A LoRA file that is damaged, cut short or foreign is refused by name."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qflux.adapters.attach import Weighted, attach_all
from qflux.commands import Trainer
from qflux.errors import CheckpointError
from qflux.models import get_family


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkpoint, data_set, cache):
    """A config and a LoRA with alpha other than the rank, trained hard enough to be seen."""
    from conftest import make_config

    settings = make_config(
        checkpoint,
        data_set,
        cache,
        tmp_path_factory.mktemp("runs"),
        "lora.alpha=10",
        "train.max_train_steps=12",
        "optimizer.init_args={lr: 0.03}",
        "predict.num_inference_steps=4",
        "predict.preprocessing=config",
    )
    return settings, Trainer(settings).fit().adapter


def load(file) -> None:
    family = get_family("flux-kontext")
    attach_all(family.tiny(0).transformer, family, [Weighted(file)])


def _without(weights, name):
    return {key: tensor for key, tensor in weights.items() if key != name}


DAMAGE = {
    "half a pair": (_without, "has no down projection"),
    "unknown part": (lambda w, k: {**_without(w, k), k.replace("lora_A", "lora_X"): w[k]}, "is no LoRA weight"),
    "wrong width": (lambda w, k: {**w, k: torch.zeros(4, 7)}, "has shapes"),
    "wrong rank": (lambda w, k: {**w, k: torch.zeros(3, w[k].shape[1])}, "their ranks do not fit"),
    "not a number": (lambda w, k: {**w, k: w[k] * float("nan")}, "NaN or infinite values"),
    "nothing": (lambda w, k: {}, "holds no tensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_lora_is_refused_by_name(trained, tmp_path, damage):
    _, adapter = trained
    change, message = DAMAGE[damage]
    weights = load_file(adapter)
    first = next(key for key in sorted(weights) if ".lora_A" in key)
    save_file(change(weights, first), tmp_path / "damaged.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "damaged.safetensors")


def test_a_lora_that_lacks_a_layer_of_its_own_description_is_refused(trained, tmp_path):
    _, adapter = trained
    with safe_open(adapter, framework="pt") as opened:
        metadata = opened.metadata()
    weights = load_file(adapter)
    layer = sorted(weights)[0].rsplit(".", 1)[0]
    kept = {key: tensor for key, tensor in weights.items() if not key.startswith(f"{layer}.")}
    save_file(kept, tmp_path / "short.safetensors", metadata)
    with pytest.raises(CheckpointError, match="which its own record names"):
        load(tmp_path / "short.safetensors")


def test_a_lora_for_another_model_is_refused_by_name(trained, tmp_path):
    _, adapter = trained
    weights = load_file(adapter)
    for part in ("lora_A.weight", "lora_B.weight"):
        weights[f"transformer.layers.99.attn.to_q.{part}"] = torch.zeros(4, 4)
    save_file(weights, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.99\.attn\.to_q"):
        load(tmp_path / "foreign.safetensors")
    (tmp_path / "garbage.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load(tmp_path / "garbage.safetensors")
