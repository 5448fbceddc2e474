"""A config is written for the model and the machine at hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from qflux.errors import ConfigError
from qflux.models.registry import shipped
from qflux.start import machine as machines
from qflux.start.machine import Machine
from qflux.start.presets import choose_model, preset
from qflux.start.writer import candidates

CPU = Machine()


@pytest.mark.parametrize("family", ["flux-kontext", "qwen-image-edit"])
@pytest.mark.parametrize("memory", [8, 12, 24, 80])
def test_a_config_is_the_same_for_every_gpu(family, memory):
    """A run fits itself to its card: nothing about memory is decided when its config is written."""
    card = Machine("a card", memory)
    chosen = preset(choose_model(None, family, card, has_controls=True), card, 100)
    assert (chosen.dtype, chosen.batch_size, chosen.largest_side, chosen.notes) == ("bfloat16", 4, 1024, ())
    assert chosen.gradient_checkpointing
    assert chosen.compile


def test_on_a_cpu_nothing_is_compiled_and_everything_is_float32(checkpoint):
    for model in (str(checkpoint), "black-forest-labs/FLUX.1-Kontext-dev"):
        chosen = preset(choose_model(model, None, CPU, has_controls=True), CPU, 30)
        assert (chosen.dtype, chosen.compile) == ("float32", False)
    assert any("no GPU" in note for note in chosen.notes)


def test_without_a_gpu_and_a_checkpoint_the_small_model_is_offered(monkeypatch, tmp_path):
    chosen = choose_model(None, None, CPU, has_controls=True)
    assert chosen.pretrained == shipped().name
    assert "there is no GPU here" in chosen.why
    assert choose_model("small", None, Machine("a card", 80), has_controls=True).why == ""
    with_card = choose_model(None, None, Machine("a card", 80), has_controls=True)
    assert with_card.pretrained == "black-forest-labs/FLUX.1-Kontext-dev"
    assert choose_model(None, None, Machine("a card", 80), has_controls=False).family == "qwen-image"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    weights = tmp_path / "models--black-forest-labs--FLUX.1-Kontext-dev/snapshots/x/transformer"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").touch()
    assert not choose_model(None, None, CPU, has_controls=True).is_small


@pytest.mark.parametrize(
    ("pretrained", "family"),
    [
        ("Qwen/Qwen-Image", "qwen-image"),
        ("Qwen/Qwen-Image-Edit", "qwen-image-edit"),
        ("Qwen/Qwen-Image-Edit-2509", "qwen-image-edit-plus"),
        ("someone/FLUX.1-Kontext-dev-bnb", "flux-kontext"),
        ("qwen-image-zoo/Qwen-Image-Edit-2509-fp8", "qwen-image-edit-plus"),
        ("/models/Qwen-Image/Qwen-Image-Edit-2509", "qwen-image-edit-plus"),
        ("/models/Qwen-Image-Edit/snapshots", "qwen-image-edit"),
        ("user/qwen-image-edit-kontext-style", "qwen-image-edit-plus"),
        ("Qwen/Qwen-Image-Edit-2511", "qwen-image-edit-plus"),
        ("black-forest-labs/FLUX.2-klein-9B", "flux2"),
        ("black-forest-labs/FLUX.2-dev", "flux2"),
        ("someone/flux2-klein-base-4B-fp8", "flux2"),
        ("/models/FLUX.2-klein-base-9B", "flux2"),
        ("someone/flux2_klein_anime", "flux2"),
        ("someone/flux_2-dev", "flux2"),
        ("black-forest-labs/flux-3-image-klein", "flux3"),
        ("someone/FLUX.3-klein-anime", "flux3"),
        ("Qwen/Qwen-Image-2.1", "qwen-image-2.1"),
        ("someone/qwen-image-2.1-cats", "qwen-image-2.1"),
        ("someone/flux-20-steps-kontext", "flux-kontext"),
        ("black-forest-labs/FLUX.1-Kontext-dev", "flux-kontext"),
        ("someone/else", "flux-kontext"),
    ],
)
def test_the_family_follows_from_the_model(pretrained, family, tmp_path):
    assert choose_model(pretrained, None, CPU, has_controls=True).family == family
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditPipeline"}))
    assert choose_model(str(tmp_path), None, CPU, has_controls=True).family == "qwen-image-edit"
    with pytest.raises(ConfigError, match="is of the family"):
        choose_model(str(tmp_path), "qwen-image", CPU, has_controls=True)


def test_the_gpu_is_found_without_torch(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24564'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = machines.this_machine()
    assert found.gpu == "NVIDIA GeForce RTX 4090"
    assert 23 < found.memory_gib < 24.1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machines.this_machine().gpu is None


@pytest.mark.parametrize(
    ("sides", "largest", "expected"),
    [([600.0, 640.0], 192, [192]), ([100.0, 110.0], 192, [112]), ([500.0, 1000.0], 1024, [512, 768, 1024])],
)
def test_candidate_areas_suit_pictures_and_model(sides, largest, expected):
    assert candidates(sides, largest) == expected


@pytest.mark.parametrize("command", [["init", "DATA", "--output", "c.yaml"], ["report", "RUN"], ["--help"]])
def test_a_first_look_does_not_wait_for_torch(command, tmp_path, data_set):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("family: flux-kontext\n")
    named = {"DATA": str(data_set), "RUN": str(tmp_path / "run")}
    arguments = [named.get(word, word) for word in command]
    code = (
        "import sys\nfrom qflux.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "print([name for name in ('torch', 'diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
