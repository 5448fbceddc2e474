"""Caches of format 1.0 and 2.0: every variant loads, trains and migrates; what can't be is named with a remedy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from helpers import tensors
from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.maintenance import verify
from qflux.cache.migrate import migrate
from qflux.cache.stored import read_stored
from qflux.cache.torch_files import read_torch
from qflux.cli import main
from qflux.commands import Trainer
from qflux.config import CacheSource, load_config
from qflux.data.encoded import COMPLETE, Variant
from qflux.errors import CacheError, DataError
from qflux.losses import map_mask_to_latent


def flux_file(height=64, width=96, controls=(), batch=True, **extra) -> dict:
    """A sample as FLUX's old cache had it; `controls` are (height, width)."""
    lead = (1,) if batch else ()
    values = {
        "prompt_embeds": torch.randn(*lead, 8, 32),
        "pooled_prompt_embeds": torch.randn(*lead, 24),
        "image_latents": torch.randn(*lead, height * width // 256, 64),
    }
    if controls:
        tokens = sum(h * w // 256 for h, w in controls)
        values["control_latents"] = torch.randn(*lead, tokens, 64)
    return values | extra


SIZE = {"height": 64, "width": 96}
CONTROL = {"height_control": 32, "width_control": 48}
VARIANTS = {
    "height and width": (flux_file(**SIZE) | SIZE, [(1, 4, 6)]),
    "without the axis of a batch": (flux_file(**SIZE, batch=False) | SIZE, [(1, 4, 6)]),
    "sizes as tensors": (flux_file(**SIZE) | {k: torch.tensor([v]) for k, v in SIZE.items()}, [(1, 4, 6)]),
    "a control": (flux_file(**SIZE, controls=[(32, 48)]) | SIZE | CONTROL, [(1, 4, 6), (1, 2, 3)]),
    "a control of the target's size": (flux_file(**SIZE, controls=[(64, 96)]) | SIZE, [(1, 4, 6), (1, 4, 6)]),
    "further controls": (
        flux_file(**SIZE, controls=[(32, 48), (64, 64)])
        | SIZE | CONTROL | {"height_control_1": 64, "width_control_1": 64, "n_controls": 2},
        [(1, 4, 6), (1, 2, 3), (1, 4, 4)],
    ),
    "further controls without a size": (
        flux_file(**SIZE, controls=[(32, 48), (32, 48)]) | SIZE | CONTROL | {"n_controls": [1]},
        [(1, 4, 6), (1, 2, 3), (1, 2, 3)],
    ),
    "controls in tensors of their own": (
        flux_file(**SIZE, controls=[(32, 48)]) | SIZE | CONTROL
        | {"control_latents_1": torch.randn(1, 16, 64), "height_control_1": 64, "width_control_1": 64},
        [(1, 4, 6), (1, 2, 3), (1, 4, 4)],
    ),
    "version 1.0 in words": (flux_file(**SIZE) | SIZE | {"version": "1.0"}, [(1, 4, 6)]),
    "version 2.0": (
        flux_file(**SIZE, controls=[(32, 48)])
        | {"version": "2.0", "img_shapes": torch.tensor([(1, 4, 6), (1, 2, 3)]), "n_controls": 1},
        [(1, 4, 6), (1, 2, 3)],
    ),
    "version 2.0, shapes in a list": (
        flux_file(**SIZE) | {"version": "2.0", "img_shapes": [[(1, 4, 6)]]}, [(1, 4, 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_loads_with_its_shapes(tmp_path, name):
    values, shapes = VARIANTS[name]
    torch.save(values, tmp_path / "a.pt")
    encoded = read_torch(tmp_path / "a.pt")[0].encoded
    assert list(encoded.shapes.images) == shapes
    assert torch.equal(encoded.target, values["image_latents"].reshape(-1, 64))
    assert [len(latents) for latents in (encoded.target, *encoded.controls)] == [h * w for _, h, w in shapes]
    assert torch.equal(encoded.text.tokens, values["prompt_embeds"].reshape(-1, 32))
    assert torch.equal(encoded.text.pooled, values["pooled_prompt_embeds"].reshape(-1))


def test_configured_defaults_stand_in_for_missing_sizes(tmp_path):
    torch.save(flux_file(64, 96, controls=[(64, 96)]), tmp_path / "a.pt")
    with pytest.raises(CacheError, match=r"a\.pt does not say its height(.|\n)*default_size"):
        read_torch(tmp_path / "a.pt")
    encoded = read_torch(tmp_path / "a.pt", (64, 96))[0].encoded
    assert encoded.shapes.images == ((1, 4, 6), (1, 4, 6))


def test_padded_qwen_text_keeps_its_valid_tokens(tmp_path):
    values = flux_file(**SIZE) | SIZE | {"prompt_embeds_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])}
    del values["pooled_prompt_embeds"]
    torch.save(values, tmp_path / "a.pt")
    encoded = read_torch(tmp_path / "a.pt")[0].encoded
    assert torch.equal(encoded.text.tokens, values["prompt_embeds"][0, :5])
    assert encoded.text.pooled is None


@pytest.mark.parametrize("form", ["pixels", "bytes", "batch of pixels", "tokens"])
def test_a_mask_in_pixels_is_brought_to_token_space(tmp_path, form):
    pixels = (torch.rand(64, 96) > 0.6).float()
    tokens = map_mask_to_latent(pixels[None])[0]
    mask = {"pixels": pixels, "bytes": (pixels * 255).byte(), "batch of pixels": pixels[None], "tokens": tokens}[form]
    torch.save(flux_file(**SIZE) | SIZE | {"mask": mask}, tmp_path / "a.pt")
    encoded = read_torch(tmp_path / "a.pt")[0].encoded
    assert torch.allclose(encoded.mask, tokens)


def test_the_empty_prompt_serves_caption_dropout(tmp_path):
    torch.save(flux_file(**SIZE) | SIZE | {"empty_prompt_embeds": torch.zeros(1, 8, 32)}, tmp_path / "a.pt")
    (sample,), _ = read_stored(CacheSource(type="cache", path=tmp_path))
    assert sample.embeddings.variants == (COMPLETE, Variant(caption=False))
    assert torch.equal(sample.embeddings.load(Variant(caption=False)).text.tokens, torch.zeros(8, 32))


class Exploit:
    def __reduce__(self):
        return os.system, ("touch /tmp/qflux_was_exploited",)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (flux_file(**SIZE) | SIZE | {"version": "3.0"}, "is of format 3.0; 1.0 and 2.0 can be read"),
        (flux_file(**SIZE) | {"version": "2.0"}, "does not say its height"),
        (flux_file(**SIZE) | {"version": "2.0", "img_shapes": 7}, "is not a sample of format 2.0"),
        (flux_file(**SIZE) | {"version": "2.0", "img_shapes": [(1, 3, 6)]}, "do not fit the shapes"),
        (flux_file(**SIZE) | {"height": 48, "width": 48}, "do not fit the shapes"),
        (flux_file(**SIZE, controls=[(32, 48)]) | SIZE | {"height_control": 64, "width_control": 64}, "do not make 6"),
        ({"prompt_embeds": torch.zeros(8, 32)}, "has no image_latents"),
        (flux_file(**SIZE) | SIZE | {"prompt_embeds": torch.zeros(2, 8, 32)}, "a batch of 2 samples"),
        (flux_file(**SIZE) | SIZE | {"mask": torch.zeros(10, 10)}, "fits neither"),
        (flux_file(**SIZE) | SIZE | {"image_latents": "x"}, "where a tensor should be"),
        ([1, 2], "holds a list"),
        (flux_file(**SIZE) | SIZE | {"note": Exploit()}, "can't be read as tensors"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_can_not_be_loaded_names_file_and_remedy(tmp_path, values, problem):
    marker = Path("/tmp/qflux_was_exploited")
    marker.unlink(missing_ok=True)
    torch.save(values, tmp_path / "old.pt")
    with pytest.raises(CacheError) as error:
        read_torch(tmp_path / "old.pt")
    assert "old.pt" in error.value.problem
    assert problem in error.value.problem
    assert "qflux cache" in error.value.remedy
    assert not marker.exists(), "code in a pickle was run"


def test_bytes_that_are_no_torch_file_are_an_error(tmp_path):
    for content in (b"", b"PK\x03\x04 not really", b"\x80\x04."):
        (tmp_path / "old.pt").write_bytes(content)
        with pytest.raises(CacheError, match=r"old\.pt can't be read as tensors"):
            read_torch(tmp_path / "old.pt")


@pytest.fixture
def old_cache(tmp_path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    for number, (values, _) in enumerate(VARIANTS.values()):
        torch.save(values, folder / f"{number}.pt")
    return folder


def training_config(checkpoint, tmp_path, sources, *overrides):
    return load_config(
        {
            "output_dir": str(tmp_path / "runs"),
            "model": {"pretrained": str(checkpoint), "dtype": "float32", "device": "cpu", "max_sequence_length": 64},
            "data": {"sources": sources, "batch_size": 4, "processor": {"target_pixels": 96 * 96}},
            "train": {"num_epochs": 1, "gradient_checkpointing": False},
        },
        overrides,
    )


def test_old_files_train_together_with_images_and_with_each_other(checkpoint, data_set, old_cache, tmp_path):
    sources = [{"path": str(data_set)}, {"type": "cache", "path": str(old_cache)}]
    settings = training_config(checkpoint, tmp_path, sources)
    Trainer(settings).cache()
    result = Trainer(settings).fit()
    assert result.coverage.trained == 12 + len(VARIANTS)


def test_a_cache_alone_trains_without_any_image(checkpoint, cache, tmp_path):
    settings = training_config(
        checkpoint, tmp_path, [{"type": "cache", "path": str(cache)}], "data.held_out={count: 2}"
    )
    planned = Trainer(settings).samples()
    assert (len(planned.training), len(planned.held_out)) == (10, 2)
    assert Trainer(settings).fit().coverage.trained == 10


def test_old_files_of_another_model_are_refused(checkpoint, tmp_path):
    (tmp_path / "old").mkdir()
    torch.save(flux_file(**SIZE) | SIZE | {"prompt_embeds": torch.zeros(8, 99)}, tmp_path / "old/a.pt")
    settings = training_config(checkpoint, tmp_path, [{"type": "cache", "path": str(tmp_path / "old")}])
    with pytest.raises(CacheError, match=r"a\.pt: text tokens of 99 channels; the transformer takes 32"):
        Trainer(settings).fit()


def test_dropout_that_old_files_can_not_serve_is_refused(checkpoint, old_cache, tmp_path):
    settings = training_config(
        checkpoint, tmp_path, [{"type": "cache", "path": str(old_cache)}], "train.caption_dropout=0.1"
    )
    with pytest.raises(CacheError, match=r"\.pt: no embedding without caption is stored"):
        Trainer(settings).fit()


def test_migration_writes_a_new_folder_and_leaves_the_old_one_alone(old_cache, tmp_path, capsys):
    torch.save({"version": "9"}, old_cache / "bad.pt")
    before = {path.name: path.read_bytes() for path in old_cache.iterdir()}
    with pytest.raises(SystemExit) as ended:
        main(["cache", "migrate", str(old_cache), str(tmp_path / "new")])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "bad.pt is of format 9" in printed.out
    assert f"{len(VARIANTS)} samples in" in printed.out
    assert {path.name: path.read_bytes() for path in old_cache.iterdir()} == before

    (old_cache / "bad.pt").unlink()
    assert migrate(CacheSource(type="cache", path=old_cache), tmp_path / "new").new_entries == 0
    assert not verify(EmbeddingCacheManager(tmp_path / "new")).broken
    old, _ = read_stored(CacheSource(type="cache", path=old_cache))
    new, _ = read_stored(CacheSource(type="cache", path=tmp_path / "new"))
    by_id = {sample.id: sample.embeddings.load(COMPLETE) for sample in new}
    assert len(by_id) == len(old) == len(VARIANTS)
    for sample in old:
        first, second = sample.embeddings.load(COMPLETE), by_id[sample.id]
        assert first.shapes == second.shapes
        for a, b in zip(tensors(first), tensors(second), strict=True):
            assert torch.equal(a, b)


def test_migrating_into_the_old_folder_is_refused(old_cache):
    for target in (old_cache, old_cache / "new"):
        with pytest.raises(DataError, match="lies in the old one"):
            migrate(CacheSource(type="cache", path=old_cache), target)


def write_original(root: Path, name: str, tensors: dict[str, torch.Tensor], **metadata) -> None:
    """A sample as the original's `EmbeddingCacheManager.save_cache_embedding` leaves it: everything in float16."""
    described = {"version": "2.0", **metadata}
    for key, tensor in tensors.items():
        described[key] = f"{name}{key}"
        (root / key).mkdir(parents=True, exist_ok=True)
        torch.save(tensor.to(torch.float16), root / key / f"{described[key]}.pt")
    (root / "metadata").mkdir(parents=True, exist_ok=True)
    (root / "metadata" / f"{name}.json").write_text(json.dumps(described, indent=2))


def original_flux(shapes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """What its FLUX trainer caches for a target and controls of these rows and columns; nothing says the target's."""
    ids = [
        torch.stack([torch.tensor([number, row, column]) for row in range(rows) for column in range(columns)])
        for number, (rows, columns) in enumerate(shapes)
    ]
    tokens = [rows * columns for rows, columns in shapes]
    return {
        "image_latents": torch.randn(tokens[0], 64),
        "control_latents": torch.randn(sum(tokens[1:]), 64),
        "pooled_prompt_embeds": torch.randn(24),
        "prompt_embeds": torch.randn(8, 32),
        "empty_pooled_prompt_embeds": torch.randn(24),
        "empty_prompt_embeds": torch.randn(8, 32),
        "control_ids": torch.cat(ids[1:]).float(),
        "text_ids": torch.zeros(8, 3),
    }


@pytest.fixture
def original(tmp_path) -> Path:
    """A cache as the original writes it: the target aligned with its first control, as its configs have it."""
    root = tmp_path / "original"
    write_original(root, "one", original_flux([(4, 6), (4, 6)]))
    write_original(root, "two", original_flux([(5, 4), (5, 4), (3, 7)]))
    write_original(root, "said", original_flux([(4, 6), (2, 2)]), img_shapes=[[3, 64, 96], [3, 32, 32]])
    return root


def test_a_cache_of_the_original_loads_with_its_shapes_and_says_what_was_rebuilt(original, caplog):
    samples, listing = read_stored(CacheSource(type="cache", path=original))
    assert not listing.faults
    shapes = {sample.name: sample.shapes.images for sample in samples}
    assert shapes == {
        "one": ((1, 4, 6), (1, 4, 6)),
        "two": ((1, 5, 4), (1, 5, 4), (1, 3, 7)),
        "said": ((1, 4, 6), (1, 2, 2)),
    }
    assert "the shapes of 2 samples are rebuilt from position ids" in caplog.text
    for sample in samples:
        assert sample.embeddings.variants == (COMPLETE, Variant(caption=False))
    (one,) = (sample for sample in samples if sample.name == "one")
    stored = torch.load(original / "control_latents" / "onecontrol_latents.pt")
    assert torch.equal(one.embeddings.load(COMPLETE).controls[0], stored)


def test_a_cache_of_the_original_trains_and_migrates(original, checkpoint, tmp_path):
    settings = training_config(
        checkpoint, tmp_path, [{"type": "cache", "path": str(original)}], "train.caption_dropout=0.5"
    )
    assert Trainer(settings).fit().coverage.trained == 3
    result = migrate(CacheSource(type="cache", path=original), tmp_path / "new")
    assert (result.samples, result.failed) == (3, [])
    old, _ = read_stored(CacheSource(type="cache", path=original))
    new, _ = read_stored(CacheSource(type="cache", path=tmp_path / "new"))
    assert {s.id: s.shapes for s in new} == {s.id: s.shapes for s in old}


def test_the_originals_qwen_cache_needs_a_size_and_takes_one(tmp_path):
    """Nothing in it tells 4x6 tokens from 6x4."""
    tensors = original_flux([(4, 6), (4, 6)])
    names = ("pooled_prompt_embeds", "empty_pooled_prompt_embeds", "control_ids", "text_ids")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in names}
    tensors |= {"prompt_embeds_mask": torch.tensor([1] * 5 + [0] * 3), "empty_prompt_embeds_mask": torch.ones(8)}
    write_original(tmp_path, "a", tensors)
    _, listing = read_stored(CacheSource(type="cache", path=tmp_path))
    assert "default_size" in listing.faults[0].remedy
    (sample,), _ = read_stored(CacheSource(type="cache", path=tmp_path, default_size=(64, 96)))
    assert sample.shapes.images == ((1, 4, 6), (1, 4, 6))
    assert sample.text_tokens == 5


def test_a_damaged_cache_of_the_original_names_the_file(original, tmp_path):
    (original / "prompt_embeds" / "oneprompt_embeds.pt").unlink()
    (original / "metadata" / "two.json").write_text("{")
    outside = tmp_path / "secret.pt"
    torch.save(torch.zeros(1), outside)
    (original / "metadata" / "evil.json").write_text(json.dumps({"version": "2.0", "image_latents": "../../secret"}))
    (original / "metadata" / "worse.json").write_text(json.dumps({"version": "2.0", "..": "secret"}))
    samples, listing = read_stored(CacheSource(type="cache", path=original))
    assert [sample.name for sample in samples] == ["said"]
    assert len([fault for fault in listing.faults if "leads out" in str(fault)]) == 2
    faults = " ".join(map(str, listing.faults))
    assert "oneprompt_embeds.pt is missing" in faults
    assert "leads out of the cache" in faults
    assert "two.json names no tensors" in faults


def test_a_file_with_several_samples_gives_each_one(checkpoint, tmp_path):
    shapes = [[(1, 4, 6), (1, 2, 3)], [(1, 5, 4)], [(1, 2, 2), (1, 3, 3), (1, 1, 4)]]
    targets, controls = [24, 20, 4], [6, 0, 13]
    values = {
        "version": "2.0",
        "prompt_embeds": torch.randn(3, 8, 32),
        "pooled_prompt_embeds": torch.randn(3, 24),
        "image_latents": torch.full((3, 24, 64), float("nan")),
        "control_latents": torch.full((3, 13, 64), float("nan")),
        "img_shapes": shapes,
        "n_controls": [1, 0, 2],
        "mask": torch.rand(3, 24),
    }
    for row in range(3):
        values["image_latents"][row, : targets[row]] = row
        values["control_latents"][row, : controls[row]] = 10 + row
    (tmp_path / "old").mkdir()
    torch.save(values, tmp_path / "old" / "batch.pt")
    samples, listing = read_stored(CacheSource(type="cache", path=tmp_path / "old"))
    assert not listing.faults
    assert [list(sample.shapes.images) for sample in samples] == shapes
    assert len({sample.id for sample in samples}) == 3
    for row, sample in enumerate(samples):
        loaded = sample.embeddings.load(COMPLETE)
        assert torch.equal(loaded.text.tokens, values["prompt_embeds"][row])
        assert torch.equal(loaded.mask, values["mask"][row, : targets[row]])
        assert bool((loaded.target == row).all())
        assert all(bool((control == 10 + row).all()) for control in loaded.controls)
    settings = training_config(checkpoint, tmp_path, [{"type": "cache", "path": str(tmp_path / "old")}])
    assert Trainer(settings).fit().coverage.trained == 3
