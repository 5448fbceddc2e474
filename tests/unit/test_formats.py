"""A LoRA goes through every format and comes back as it was, with its strength."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.loaders.lora_conversion_utils import (
    _convert_kohya_flux2_lora_to_diffusers,
    _convert_kohya_flux_lora_to_diffusers,
    _convert_non_diffusers_flux2_lora_to_diffusers,
    _convert_non_diffusers_flux3_lora_to_diffusers,
    _convert_non_diffusers_qwen_lora_to_diffusers,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from family_samples import REFERENCES
from qflux.adapters.attach import Weighted, attach, attach_all, set_weights
from qflux.adapters.export import merge, probe, require_same_output, save_verified
from qflux.adapters.files import Record, names_of, read_adapter
from qflux.adapters.formats import format_of, from_tensors
from qflux.adapters.formats.comfyui import COMFYUI
from qflux.adapters.layers import LoraLayer, LoraLayers, same
from qflux.adapters.names import Names
from qflux.adapters.publish import write_card
from qflux.errors import CheckpointError
from qflux.models import get_family
from qflux.sampling.predictor import recorded_preprocessing

FAMILIES = ("flux-kontext", "qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "flux2", "flux3", "qwen-image-2.1")
FLUX_WIDTH, FLUX_MLP = 3072, 12288


def model(name: str):
    family = get_family(name)
    transformer = family.tiny(0).transformer
    return family, transformer, names_of(family, transformer)


def random_lora(names: Names, targets: tuple[str, ...], rank: int = 4, alpha: float = 7.0, dora=False) -> LoraLayers:
    torch.manual_seed(0)
    return {
        name: LoraLayer(
            torch.randn(rank, inputs) * 0.2,
            torch.randn(outputs, rank) * 0.2,
            alpha,
            torch.rand(outputs) + 0.5 if dora else None,
        )
        for name, (outputs, inputs) in names.shapes.items()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    }


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
EVERYTHING = (
    *ATTENTION,
    "add_q_proj",
    "add_v_proj",
    "to_add_out",
    "net.0.proj",
    "net.2",
    "proj_mlp",
    "proj_out",
    "linear",
    "linear_in",
    "linear_out",
    "to_qkv_mlp_proj",
    "attn.to_out",
)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("targets", [ATTENTION, ("to_k",), EVERYTHING], ids=["attention", "keys only", "everything"])
def test_diffusers_to_comfyui_and_back_is_bit_identical(name, targets, tmp_path):
    family, transformer, names = model(name)
    record = Record(family.name)
    lora = random_lora(names, targets)
    save_verified(tmp_path / "a.safetensors", lora, "diffusers", names, record)
    first = read_adapter(tmp_path / "a.safetensors").layers(family, transformer)
    save_verified(tmp_path / "b.safetensors", first, "comfyui", names, record)
    second = read_adapter(tmp_path / "b.safetensors").layers(family, transformer)
    save_verified(tmp_path / "c.safetensors", second, "diffusers", names, record)
    assert same(format_of("diffusers").filed(lora, names), second) is None
    original, returned = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "c.safetensors")
    assert original.keys() == returned.keys()
    assert all(torch.equal(original[key], returned[key]) for key in original)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_has_an_explicit_alpha_and_the_file_says_how_it_was_made(name, form, tmp_path):
    family, _, names = model(name)
    record = Record(
        family.name, preprocessing={"target_pixels": 9}, timesteps={"shift": "resolution"}, recipe={"seed": 3}
    )
    file = tmp_path / "x.safetensors"
    save_verified(file, random_lora(names, ATTENTION), form, names, record)
    tensors = load_file(file)
    layers = {key.rpartition(".lora_")[0] for key in tensors if ".lora_" in key}
    if form == "diffusers" and not family.lora_alphas:  # its pipeline takes none: the strength is in the matrices
        layers = set()
    assert {key.removesuffix(".alpha") for key in tensors if key.endswith(".alpha")} == layers
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    said = json.loads(metadata["qflux"])
    assert (said["family"], said["preprocessing"], said["timesteps"]) == (
        name,
        {"target_pixels": 9},
        {"shift": "resolution"},
    )
    assert said["version"]
    assert metadata["ss_network_alpha"]


def full_size_names() -> Names:
    """The layers of the published FLUX, without its weights."""
    family = get_family("flux-kontext")
    with torch.device("meta"):
        transformer = family.transformer(guidance_embeds=True)
    return names_of(family, transformer)


@pytest.mark.parametrize(
    "targets",
    [
        ATTENTION,
        pytest.param(
            (*ATTENTION, "proj_mlp", "net.0.proj", "to_add_out", "add_q_proj", "add_k_proj", "add_v_proj"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["attention", "more"],
)
def test_what_diffusers_reads_from_the_comfyui_format_has_the_same_effect(targets):
    """diffusers converts it for the published sizes only, so this is at full size, a few blocks compared."""
    names = full_size_names()
    lora = random_lora(names, targets, rank=2, alpha=3.0)
    keep = ("transformer_blocks.0.", "transformer_blocks.18.", "single_transformer_blocks.37.")
    lora = {name: layer for name, layer in lora.items() if name.startswith(keep)}
    theirs = _convert_kohya_flux_lora_to_diffusers(format_of("comfyui").write(lora, names))
    for name, layer in lora.items():
        down, up = (theirs.pop(f"transformer.{name}.lora_{part}.weight") for part in "AB")
        assert torch.allclose(up @ down, layer.scale * layer.up @ layer.down, atol=1e-5), name
    for key, tensor in theirs.items():  # what nobody trained does nothing
        if key.endswith("lora_B.weight"):
            assert not tensor.any(), key


def test_what_diffusers_reads_from_qwens_comfyui_format_has_the_same_effect():
    _, _, names = model("qwen-image")
    lora = random_lora(names, (*ATTENTION, "add_q_proj", "to_add_out", "net.0.proj", "net.2"))
    theirs = _convert_non_diffusers_qwen_lora_to_diffusers(format_of("comfyui").write(lora, names))
    assert {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in theirs} == set(lora)
    for name, layer in lora.items():
        down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        assert torch.allclose(up @ down, layer.scale * layer.up @ layer.down, atol=1e-5), name


FLUX2_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
FLUX2_LAYERS = (*ATTENTION, *FLUX2_TEXT, "linear_in", "linear_out", "to_qkv_mlp_proj", "attn.to_out")


@pytest.mark.parametrize("alpha", [2.0, 4.0, 7.0])
def test_what_diffusers_reads_from_flux2s_comfyui_format_has_the_same_effect(alpha):
    _, _, names = model("flux2")
    lora = random_lora(names, FLUX2_LAYERS, alpha=alpha)
    theirs = _convert_kohya_flux2_lora_to_diffusers(format_of("comfyui").write(lora, names))
    assert {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in theirs} == set(lora)
    for name, layer in lora.items():
        down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        assert torch.allclose(up @ down, layer.scale * layer.up @ layer.down, atol=1e-5), name


@pytest.mark.parametrize("suffixes", [("lora_A", "lora_B"), ("lora_down", "lora_up")], ids=str)
def test_flux2_files_of_ai_toolkit_load_as_diffusers_loads_them(suffixes, tmp_path):
    """`diffusion_model.` and the original names, in which query, key and value are one layer; no alphas."""
    family, transformer, names = model("flux2")
    torch.manual_seed(0)
    tensors = {}
    for original, members in names.fused.items():
        if original in family.swapped_names:
            continue  # diffusers' reader leaves its two halves as they are, which its own base weights do not
        outputs, inputs = sum(names.shapes[member][0] for member in members), names.shapes[members[0]][1]
        for suffix, shape in zip(suffixes, ((4, inputs), (outputs, 4)), strict=True):
            tensors[f"diffusion_model.{original}.{suffix}.weight"] = torch.randn(shape) * 0.2
    save_file(tensors, tmp_path / "x.safetensors")
    ours = read_adapter(tmp_path / "x.safetensors").layers(family, transformer)
    theirs = _convert_non_diffusers_flux2_lora_to_diffusers(dict(tensors))
    assert {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in theirs} == set(ours)
    for name, layer in ours.items():
        down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        assert torch.allclose(layer.scale * layer.up @ layer.down, up @ down, atol=1e-5), name


@pytest.mark.parametrize("alpha", [2.0, 7.0])
def test_what_diffusers_reads_from_flux3s_original_names_has_the_same_effect(alpha):
    family, _, names = model("flux3")
    lora = random_lora(names, family.facts.lora_targets, alpha=alpha)
    tensors = {}
    for original, (layer,) in names.fused.items():
        if layer not in lora:
            continue  # no layer of a block: diffusers' reader does not know its original name
        found = lora[layer]
        strength = found.scale
        tensors |= {f"diffusion_model.{original}.lora_A.weight": found.down}
        tensors |= {f"diffusion_model.{original}.lora_B.weight": strength * found.up}
    theirs = _convert_non_diffusers_flux3_lora_to_diffusers(tensors)
    assert {key.removeprefix("transformer.").rpartition(".lora_")[0] for key in theirs} == set(lora)
    for name, layer in lora.items():
        down, up = (theirs[f"transformer.{name}.lora_{part}.weight"] for part in "AB")
        assert torch.allclose(up @ down, layer.scale * layer.up @ layer.down, atol=1e-5), name


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("alpha", [1.0, 4.0, 10.0])
def test_a_file_loads_into_diffusers_with_no_unmatched_key_and_its_strength(name, alpha, tmp_path, caplog):
    family, transformer, names = model(name)
    lora = random_lora(names, ATTENTION, alpha=alpha)
    save_verified(tmp_path / "pytorch_lora_weights.safetensors", lora, "diffusers", names, Record(name))
    attach(transformer, lora, "mine")
    set_weights(transformer, {"mine": 1.0})
    ours = probe(transformer, family)

    parts = family.tiny(0)
    pipeline = REFERENCES[name].make(family.pipeline, {k: v for k, v in vars(parts).items() if v is not None})
    logging.getLogger("diffusers").propagate = True
    with caplog.at_level(logging.WARNING):
        pipeline.load_lora_weights(tmp_path)
    assert not [record.message for record in caplog.records if "led to" in record.message]
    assert torch.allclose(probe(pipeline.transformer, family), ours, atol=1e-5)


def test_a_foreign_kohya_file_without_a_record_loads_with_its_effect(tmp_path):
    """Nothing says what was put together: every part gets the whole."""
    family, transformer, names = model("flux-kontext")
    lora = random_lora(names, ATTENTION)
    save_file(format_of("comfyui").write(lora, names), tmp_path / "foreign.safetensors")
    loaded = read_adapter(tmp_path / "foreign.safetensors").layers(family, transformer)
    assert loaded.keys() == lora.keys()
    assert require_same_output(transformer, family, lora, loaded) < 1e-5


def test_a_foreign_peft_file_takes_alpha_from_its_description_or_from_its_rank(tmp_path):
    family, transformer, names = model("flux-kontext")
    lora = random_lora(names, ATTENTION, rank=4, alpha=8.0)
    plain = {k: t for k, t in format_of("diffusers").write(lora, names).items() if not k.endswith(".alpha")}
    described = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.r": 4})}
    for metadata, alpha in ((described, 8.0), ({}, 4.0)):
        save_file(plain, tmp_path / "x.safetensors", metadata)
        layers = read_adapter(tmp_path / "x.safetensors").layers(family, transformer)
        assert {layer.alpha for layer in layers.values()} == {alpha}


def test_strength_follows_pefts_patterns_and_rank_stabilised_scaling(tmp_path):
    family, transformer, names = model("flux-kontext")
    lora = random_lora(names, ATTENTION)
    tensors = {}
    for name, layer in lora.items():
        tensors[f"transformer.{name}.lora_A.weight"], tensors[f"transformer.{name}.lora_B.weight"] = (
            layer.down,
            layer.up,
        )
    settings = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 2, r"single_transformer_blocks\.0\.attn\.to_k": 1}}
    for stabilised in (False, True):
        described = {f"transformer.{key}": value for key, value in (settings | {"use_rslora": stabilised}).items()}
        file = tmp_path / "peft.safetensors"
        save_file(tensors, file, {LORA_ADAPTER_METADATA_KEY: json.dumps(described)})
        found = read_adapter(file).layers(family, transformer)
        for name, layer in found.items():
            alpha = 2 if name.endswith(".to_q") else 1 if name == "single_transformer_blocks.0.attn.to_k" else 8
            assert layer.scale == pytest.approx(alpha / (layer.rank**0.5 if stabilised else layer.rank))


@pytest.mark.parametrize("alphas", [(8.0, 16.0, 8.0), (8.0, 3.0, 5.0)])
def test_queries_keys_and_values_of_different_strength_go_there_and_back(alphas, tmp_path):
    family, transformer, names = model("flux-kontext")
    strengths = dict(zip(("to_q", "to_k", "to_v"), alphas, strict=True))
    lora = {
        name: replace(layer, alpha=strengths.get(name.rpartition(".")[2], layer.alpha))
        for name, layer in random_lora(names, ATTENTION).items()
    }
    save_verified(tmp_path / "c.safetensors", lora, "comfyui", names, Record(family.name))
    again = read_adapter(tmp_path / "c.safetensors").layers(family, transformer)
    assert again.keys() == lora.keys()
    for name, layer in lora.items():
        assert again[name].alpha == layer.alpha
        assert torch.allclose(again[name].up, layer.up, rtol=1e-6, atol=0)


def test_a_layer_that_the_original_model_lacks_is_refused_by_name(tmp_path):
    family, _, names = model("flux-kontext")
    names = replace(names, fused={k: v for k, v in names.fused.items() if "final_layer.adaLN" not in k})
    lora = random_lora(names, ("norm_out.linear",))
    with pytest.raises(CheckpointError, match=r"norm_out\.linear has no counterpart"):
        save_verified(tmp_path / "c.safetensors", lora, "comfyui", names, Record(family.name))


def test_the_last_modulation_is_shift_and_scale_there_and_scale_and_shift_here():
    _, _, names = model("flux-kontext")
    ((name, layer),) = random_lora(names, ("norm_out.linear",)).items()
    theirs = format_of("comfyui").write({name: layer}, names)
    up = theirs["lora_unet_final_layer_adaLN_modulation_1.lora_up.weight"]
    half = len(up) // 2
    assert torch.equal(up[:half], layer.up[half:])
    assert torch.equal(up[half:], layer.up[:half])
    assert same({name: layer}, from_tensors("x", theirs, names)) is None


def test_a_file_that_fails_its_check_does_not_replace_the_previous_one(tmp_path):
    family, _, names = model("flux-kontext")
    file = tmp_path / "x.safetensors"
    save_verified(file, random_lora(names, ("to_q",)), "diffusers", names, Record(family.name))
    before = file.read_bytes()

    def refuse(written):
        raise CheckpointError("not the same")

    with pytest.raises(CheckpointError):
        save_verified(file, random_lora(names, ("to_k",)), "comfyui", names, Record(family.name), refuse)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


NONSENSE = {
    "alpha that is no number": (lambda t, k: t | {f"{k}.alpha": torch.tensor(float("nan"))}, {}),
    "two alphas": (lambda t, k: t | {f"{k}.alpha": torch.ones(2)}, {}),
    "rank 0": (lambda t, k: {f"{k}.lora_A.weight": torch.ones(0, 64), f"{k}.lora_B.weight": torch.ones(64, 0)}, {}),
    "a word for alpha": (lambda t, k: t, {"lora_alpha": "abc"}),
    "a list of patterns": (lambda t, k: t, {"lora_alpha": 4, "alpha_pattern": ["x"]}),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_file_with_a_nonsensical_strength_is_refused_with_the_layers_name(case, tmp_path):
    family, transformer, names = model("flux-kontext")
    ((name, layer),) = random_lora(names, ("single_transformer_blocks.0.attn.to_q",)).items()
    key = f"transformer.{name}"
    change, settings = NONSENSE[case]
    tensors = change({f"{key}.lora_A.weight": layer.down, f"{key}.lora_B.weight": layer.up}, key)
    described = {f"transformer.{setting}": value for setting, value in settings.items()}
    save_file(tensors, tmp_path / "x.safetensors", {LORA_ADAPTER_METADATA_KEY: json.dumps(described)})
    with pytest.raises(CheckpointError, match=name):
        read_adapter(tmp_path / "x.safetensors").layers(family, transformer)


def test_parts_of_different_strength_keep_their_effect_when_put_together():
    family, transformer, names = model("flux-kontext")
    lora = random_lora(names, ATTENTION)
    lora = {n: LoraLayer(layer.down, layer.up, 2.0 if "to_k" in n else 7.0) for n, layer in lora.items()}
    back = from_tensors("x", format_of("comfyui").write(lora, names), names)
    assert require_same_output(transformer, family, lora, back) < 1e-5


REFUSED = {
    "a layer the base lacks": (lambda n, o: {"transformer.layers.99.to_q": n}, r"no layer layers\.99\.to_q"),
    "another width": (lambda n, o: {o: LoraLayer(n.down[:, :-1], n.up, 4.0)}, "has shapes"),
    "another number of outputs": (lambda n, o: {o: LoraLayer(n.down, n.up[:-1], 4.0)}, "has shapes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_lora_that_does_not_fit_is_refused_with_the_layers_name(case, tmp_path):
    family, transformer, names = model("flux-kontext")
    name, layer = next(iter(random_lora(names, ("to_q",)).items()))
    change, message = REFUSED[case]
    tensors = {}
    for key, changed in change(layer, f"transformer.{name}").items():
        tensors |= {f"{key}.lora_A.weight": changed.down.contiguous(), f"{key}.lora_B.weight": changed.up.contiguous()}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=message):
        attach_all(transformer, family, [Weighted(tmp_path / "x.safetensors")])


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_a_lora_for_another_family_is_refused(form, tmp_path):
    flux, _, names = model("flux-kontext")
    qwen, transformer, _ = model("qwen-image")
    save_verified(tmp_path / "x.safetensors", random_lora(names, ATTENTION), form, names, Record(flux.name))
    with pytest.raises(CheckpointError, match="was trained for flux-kontext, the config says qwen-image"):
        attach_all(transformer, qwen, [Weighted(tmp_path / "x.safetensors")])
    save_file(load_file(tmp_path / "x.safetensors"), tmp_path / "y.safetensors")  # it no longer says so
    with pytest.raises(CheckpointError, match=r"(no layer|has shapes).*(single|blocks)"):
        attach_all(transformer, qwen, [Weighted(tmp_path / "y.safetensors")])


def test_several_loras_count_by_their_weights(tmp_path):
    family, transformer, names = model("flux-kontext")
    first, second = random_lora(names, ATTENTION), random_lora(names, ("to_v",), rank=2, alpha=2.0)
    for file, lora in (("a", first), ("b", second)):
        save_verified(tmp_path / f"{file}.safetensors", lora, "diffusers", names, Record(family.name))
    attach_all(
        transformer, family, [Weighted(tmp_path / "a.safetensors", 0.5), Weighted(tmp_path / "b.safetensors", -1.5)]
    )
    attached = probe(transformer, family)
    plain = family.tiny(0).transformer
    for weight, lora in ((0.5, first), (-1.5, second)):
        for name, layer in lora.items():
            plain.get_submodule(name).weight.data += weight * layer.scale * layer.up @ layer.down
    assert torch.allclose(attached, probe(plain, family), atol=1e-5)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image-edit-plus", "flux2", "flux3", "qwen-image-2.1"])
def test_merged_weights_reproduce_base_and_lora(name, dora):
    family, transformer, names = model(name)
    lora = random_lora(names, ATTENTION, dora=dora)
    merged = family.tiny(0).transformer
    report = merge(merged, [(lora, 1.0)])
    attach(transformer, lora, "x")
    set_weights(transformer, {"x": 1.0})
    assert torch.allclose(probe(merged, family), probe(transformer, family), atol=1e-5)
    assert report.layers == len(lora)
    assert report.lost < 1e-6


@pytest.mark.parametrize("doras", [(True, True), (True, False)], ids=["two DoRAs", "DoRA and LoRA"])
def test_merging_several_adapters_gives_what_attaching_them_gives(doras):
    family, transformer, names = model("flux-kontext")
    first = random_lora(names, ATTENTION, dora=doras[0])
    second = {
        name: replace(layer, up=-0.5 * layer.up) for name, layer in random_lora(names, ATTENTION, dora=doras[1]).items()
    }
    merged = family.tiny(0).transformer
    merge(merged, [(first, 1.0), (second, 1.0)])
    attach(transformer, first, "x")
    attach(transformer, second, "y")
    set_weights(transformer, {"x": 1.0, "y": 1.0})
    assert torch.allclose(probe(merged, family), probe(transformer, family), atol=1e-5)


def test_merging_into_bf16_reports_the_share_lost_to_rounding():
    family, _, names = model("flux-kontext")
    lora = random_lora(names, ATTENTION)
    small = {n: LoraLayer(layer.down, layer.up * 1e-3, layer.alpha) for n, layer in lora.items()}
    shares = []
    for layers in (lora, small):
        base = family.tiny(0).transformer.to(torch.bfloat16)
        before = {n: base.get_submodule(n).weight.float() for n in layers}
        shares.append(merge(base, [(layers, 1.0)]).lost)
        wanted = sum((layer.added_to(before[n], before[n]) - before[n]).square().sum() for n, layer in layers.items())
        left = sum(
            (base.get_submodule(n).weight.float() - layer.added_to(before[n], before[n])).square().sum()
            for n, layer in layers.items()
        )
        assert shares[-1] == pytest.approx(float((left / wanted).sqrt()), rel=1e-3)
    assert shares[0] < 0.05 < shares[1]


def test_a_file_that_does_not_read_back_is_not_written_and_the_previous_one_stays(tmp_path, monkeypatch):
    family, _, names = model("flux-kontext")
    file = tmp_path / "x.safetensors"
    save_verified(file, random_lora(names, ("to_q",)), "diffusers", names, Record(family.name))
    before = file.read_bytes()
    right = type(COMFYUI).write
    broken = lambda self, layers, names: {k: t * 2 for k, t in right(self, layers, names).items()}  # noqa: E731
    monkeypatch.setattr(type(COMFYUI), "write", broken)
    with pytest.raises(CheckpointError, match=r"was not written: read back as comfyui, .* is not what was trained"):
        save_verified(file, random_lora(names, ("to_q",)), "comfyui", names, Record(family.name))
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dora_is_refused_for_comfyui_with_the_reason(name):
    """ComfyUI divides by the norm of the base alone (`weight_decompose` in its `weight_adapter/base.py`)."""
    _, _, names = model(name)
    with pytest.raises(CheckpointError, match="divides by the norm of the base weight") as error:
        format_of("comfyui").write(random_lora(names, ("to_out.0",), dora=True), names)
    assert "merged" in error.value.remedy


@pytest.mark.parametrize("alpha", [4.0, 10.0])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_dora_loads_into_diffusers_with_its_strength_and_back(name, alpha, tmp_path, caplog):
    family, transformer, names = model(name)
    lora = random_lora(names, ATTENTION, alpha=alpha, dora=True)
    odd = next(iter(lora))
    lora[odd] = replace(lora[odd], alpha=1.0)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_verified(file, lora, "diffusers", names, Record(name))
    filed = format_of("diffusers").filed(lora, names)
    assert same(filed, read_adapter(file).layers(family, transformer)) is None
    attach(transformer, lora, "mine")
    set_weights(transformer, {"mine": 1.0})
    parts = family.tiny(0)
    pipeline = REFERENCES[name].make(family.pipeline, {k: v for k, v in vars(parts).items() if v is not None})
    logging.getLogger("diffusers").propagate = True
    with caplog.at_level(logging.WARNING):
        pipeline.load_lora_weights(tmp_path)
    assert not [record.message for record in caplog.records if "led to" in record.message]
    assert torch.allclose(probe(pipeline.transformer, family), probe(transformer, family), atol=1e-5)


def flat(lora: LoraLayers, prefix: str) -> dict[str, torch.Tensor]:
    """diffusers' names with underscores, as OneTrainer and SimpleTuner write them."""
    tensors = {}
    for name, layer in lora.items():
        key = f"{prefix}{name.replace('.', '_')}"
        tensors |= {f"{key}.lora_down.weight": layer.down, f"{key}.lora_up.weight": layer.up}
        tensors[f"{key}.alpha"] = torch.tensor(layer.alpha)
    return tensors


@pytest.mark.parametrize("prefix", ["lora_transformer_", "lycoris_"], ids=["OneTrainer", "SimpleTuner"])
@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image-edit", "flux2", "flux3", "qwen-image-2.1"])
def test_files_of_other_trainers_load_with_their_strength(name, prefix, tmp_path):
    family, transformer, names = model(name)
    lora = random_lora(names, EVERYTHING, alpha=3.0)
    save_file(flat(lora, prefix), tmp_path / "x.safetensors")
    assert same(lora, read_adapter(tmp_path / "x.safetensors").layers(family, transformer)) is None


@pytest.mark.parametrize("prefix", ["lora_te1_", "lora_te2_", "lora_te_", "text_encoder.", "text_encoder_2."])
def test_layers_of_a_text_encoder_are_left_out_with_a_word(prefix, tmp_path, caplog):
    family, transformer, names = model("flux-kontext")
    lora = random_lora(names, ATTENTION)
    tensors = format_of("comfyui").write(lora, names)
    tensors[f"{prefix}text_model_encoder_layers_0_mlp_fc1.lora_down.weight"] = torch.ones(4, 8)
    tensors[f"{prefix}text_model_encoder_layers_0_mlp_fc1.lora_up.weight"] = torch.ones(8, 4)
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = read_adapter(tmp_path / "x.safetensors").layers(family, transformer)
    assert require_same_output(transformer, family, lora, loaded) < 1e-5
    assert "2 tensors of text encoders are left out" in caplog.text


def test_a_lokr_of_another_program_is_named(tmp_path):
    family, transformer, _ = model("flux-kontext")
    key = "lycoris_transformer_blocks_0_attn_to_q"
    save_file({f"{key}.lokr_w1": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="LoKr or LoHa of another program"):
        read_adapter(tmp_path / "x.safetensors").layers(family, transformer)


def test_pefts_own_file_takes_its_strength_from_the_config_beside_it(tmp_path, caplog):
    """Written by PEFT itself."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer as PeftLayer

    family, transformer, _ = model("flux-kontext")
    wrapped = get_peft_model(
        family.tiny(0).transformer, LoraConfig(r=4, lora_alpha=12, target_modules=["to_q"], init_lora_weights=False)
    )
    wrapped.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        layers = read_adapter(path).layers(family, transformer)
        assert {layer.alpha for layer in layers.values()} == {12.0}
    assert len(layers) == sum(isinstance(module, PeftLayer) for module in wrapped.modules())
    expected = probe(wrapped.base_model.model, family)
    attach_all(transformer, family, [Weighted(tmp_path)])
    assert torch.allclose(probe(transformer, family), expected, atol=1e-5)
    (tmp_path / "adapter_config.json").unlink()
    read_adapter(tmp_path)
    assert "its strength is taken to be 1" in caplog.text


@pytest.mark.parametrize("shape", [(1, 64), (64, 64), (32,)])
def test_magnitudes_that_are_not_per_output_are_refused_and_never_misread(shape, tmp_path):
    family, transformer, names = model("flux-kontext")
    ((name, layer),) = random_lora(names, ("single_transformer_blocks.0.attn.to_q",)).items()
    assert names.shapes[name] == (64, 64), "a square layer"
    tensors = flat({name: layer}, "lora_transformer_")
    tensors[f"lora_transformer_{name.replace('.', '_')}.dora_scale"] = torch.ones(shape)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="DoRA magnitudes of shape"):
        read_adapter(tmp_path / "x.safetensors").layers(family, transformer)


def test_metadata_of_a_hundred_thousand_brackets_is_an_error_and_no_crash(tmp_path):
    for key in ("qflux", LORA_ADAPTER_METADATA_KEY):
        save_file({"x.lora_A.weight": torch.ones(1, 1)}, tmp_path / "x.safetensors", {key: "[" * 100_000})
        with pytest.raises(CheckpointError, match="can't be read"):
            read_adapter(tmp_path / "x.safetensors")


@pytest.mark.parametrize("alpha", [4.0, 10.0])
@pytest.mark.parametrize("name", ["flux-kontext", "qwen-image", "flux2", "flux3", "qwen-image-2.1"])
def test_on_the_transformer_alone_the_alphas_are_given_along(name, alpha, tmp_path):
    """`load_lora_adapter` reads no alpha tensors; what docs/inference.md says of it."""
    family, transformer, names = model(name)
    lora = random_lora(names, ATTENTION, alpha=alpha)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_verified(file, lora, "diffusers", names, Record(name))
    attach(transformer, lora, "mine")
    set_weights(transformer, {"mine": 1.0})
    tensors = load_file(file)
    prefixed = {key if key.startswith("transformer.") else f"transformer.{key}": t for key, t in tensors.items()}
    alphas = {key: float(t) for key, t in prefixed.items() if key.endswith(".alpha")}
    weights = {key: t for key, t in prefixed.items() if not key.endswith(".alpha")}
    stock = family.tiny(0).transformer
    stock.load_lora_adapter(weights, network_alphas=alphas)
    assert torch.allclose(probe(stock, family), probe(transformer, family), atol=1e-5)


def test_a_foreign_dora_of_fused_layers_keeps_each_rows_magnitude(tmp_path):
    """kohya's names: query, key and value in one, and the last modulation in another order."""
    family, transformer, names = model("flux-kontext")
    torch.manual_seed(0)
    tensors = {}
    for original in ("double_blocks.0.img_attn.qkv", "final_layer.adaLN_modulation.1"):
        outputs = sum(names.shapes[member][0] for member in names.fused[original])
        inputs = names.shapes[names.fused[original][0]][1]
        key = f"lora_unet_{original.replace('.', '_')}"
        tensors |= {f"{key}.lora_down.weight": torch.randn(4, inputs), f"{key}.lora_up.weight": torch.randn(outputs, 4)}
        tensors |= {f"{key}.alpha": torch.tensor(4.0), f"{key}.dora_scale": torch.rand(outputs, 1) + 0.5}
    save_file(tensors, tmp_path / "x.safetensors")
    layers = read_adapter(tmp_path / "x.safetensors").layers(family, transformer)
    scale = tensors["lora_unet_double_blocks_0_img_attn_qkv.dora_scale"].flatten()
    for number, part in enumerate(("to_q", "to_k", "to_v")):
        assert torch.equal(layers[f"transformer_blocks.0.attn.{part}"].magnitude, scale[64 * number : 64 * number + 64])
    last = tensors["lora_unet_final_layer_adaLN_modulation_1.dora_scale"].flatten()
    assert torch.equal(layers["norm_out.linear"].magnitude, torch.cat([last[64:], last[:64]]))


def test_lists_for_controls_of_older_files_are_not_taken_for_todays(config, caplog):
    settings = config("data.processor={target_size: [64, 64], controls_size: [[32, 32]], controls_pixels: 4096}")
    today = Record.of(settings)
    assert recorded_preprocessing(today)["controls_size"] == [[32, 32]]
    older = recorded_preprocessing(replace(today, controls_from=1))
    assert "controls_size" not in older
    assert older["target_size"] == [64, 64]
    assert "controls_size and controls_pixels began with the second control" in caplog.text


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_card_says_how_references_are_numbered_in_comfyui_where_that_matters(name, tmp_path):
    family = get_family(name)
    card = write_card(tmp_path, Record(name), family, "x.safetensors").read_text()
    assert family.pipeline in card
    assert ("the reference method `index`" in card) == (name == "flux-kontext")


def test_numbers_that_break_the_model_are_an_error_that_names_the_file():
    family, transformer, names = model("flux-kontext")
    lora = {name: replace(layer, up=layer.up * 1e30) for name, layer in random_lora(names, ATTENTION).items()}
    with pytest.raises(CheckpointError, match=r"broken\.safetensors: with it the model's output is NaN or infinite"):
        require_same_output(transformer, family, lora, lora, "broken.safetensors")


def test_a_fused_layer_without_strength_is_an_error_that_names_it(tmp_path):
    family, transformer, names = model("flux-kontext")
    tensors = format_of("comfyui").write(random_lora(names, ATTENTION), names)
    record = Record("flux-kontext")
    save_verified(tmp_path / "own.safetensors", random_lora(names, ATTENTION), "comfyui", names, record)
    with safe_open(tmp_path / "own.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no dict)
    zeros = {key: torch.zeros_like(value) if key.endswith("alpha") else value for key, value in tensors.items()}
    save_file(zeros, tmp_path / "zeros.safetensors", metadata)
    with pytest.raises(CheckpointError, match=r"zeros\.safetensors: the alpha of .* is 0"):
        read_adapter(tmp_path / "zeros.safetensors").layers(family, transformer)
