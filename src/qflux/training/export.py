"""From a trained adapter to files for other programs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from qflux.adapters.attach import Weighted
from qflux.adapters.export import merge, probe, require_same_output, save_verified, write_transformer
from qflux.adapters.files import AdapterFile, Record, names_of, read_adapter
from qflux.adapters.publish import write_card
from qflux.errors import CheckpointError, ConfigError, DataError
from qflux.models.loading import checkpoint_folder, load_transformer

if TYPE_CHECKING:
    from torch import nn

    from qflux.training.trainer import Trainer

MUCH_LOST = 0.1
"""A larger share of the change lost to rounding is worth a word."""


def export_adapters(
    trainer: Trainer, adapters: Sequence[Weighted], form: Literal["diffusers", "comfyui", "merged"], target: Path
) -> Iterator[str]:
    """Export; yields what there is to say about it."""
    files = [read_adapter(adapter.path) for adapter in adapters]
    for file in files:
        file.require_family(trainer.family)
        if file.is_product:
            raise CheckpointError(
                f"{file.path} is a LoKr or LoHa, which has no other format", "use it with `qflux predict`."
            )
    if form == "merged":
        if target.suffix:
            raise DataError(f"--output {target} looks like a file", "a merged checkpoint is a folder.")
    elif len(files) > 1 or adapters[0].weight != 1.0:
        raise DataError(
            f"--format {form} writes one LoRA as it is", "use --format merged for several, or for another strength."
        )
    elif target.suffix != ".safetensors":
        raise DataError(f"--output {target} is no .safetensors file", "give a name that ends in .safetensors.")
    model = trainer.config.model
    if model.quantization:
        raise ConfigError("an export needs the base in full precision", "set model.quantization: null.")
    transformer = load_transformer(trainer.family.transformer, model, trainer.dtype, trainer.device)
    if form == "merged":
        yield from _merged(trainer, transformer, files, [adapter.weight for adapter in adapters], target)
    else:
        yield from _converted(trainer, transformer, files[0], form, target)


def _converted(
    trainer: Trainer, transformer: nn.Module, file: AdapterFile, form: Literal["diffusers", "comfyui"], target: Path
) -> Iterator[str]:
    names = names_of(trainer.family, transformer)
    layers = file.layers(trainer.family, transformer)
    record = file.record or Record(trainer.family.name)
    written = save_verified(target, layers, form, names, record)
    apart = require_same_output(transformer, trainer.family, layers, written.layers(trainer.family, transformer))
    card = write_card(target.parent, record, trainer.family.pipeline, target.name)
    yield f"{len(layers)} layers as {form}, read back and compared (outputs differ by {apart:.1g}): {target}"
    yield str(card)


def _merged(
    trainer: Trainer, transformer: nn.Module, files: Sequence[AdapterFile], weights: Sequence[float], target: Path
) -> Iterator[str]:
    """A whole checkpoint: the merged transformer, and every other part as it is."""
    loras = [file.layers(trainer.family, transformer) for file in files]
    report = merge(transformer, list(zip(loras, weights, strict=True)))
    if target.exists() and not (target / "model_index.json").is_file() and any(target.iterdir()):
        raise DataError(f"--output {target} holds something else", "give a new folder.")
    staging = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        _write_checkpoint(trainer, transformer, staging)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    yield f"{report.layers} layers merged into {trainer.config.model.dtype}, read back and compared: {target}"
    yield f"{report.lost:.2%} of the change is lost to rounding"
    if report.lost > MUCH_LOST:
        yield "that is much: merge with --set model.dtype=float32, or keep the LoRA apart"


def _write_checkpoint(trainer: Trainer, transformer: nn.Module, folder: Path) -> None:
    """Everything that `from_pretrained` needs; the transformer is read back, and must compute the same."""
    family, model = trainer.family, trainer.config.model
    parts = ("scheduler", *family.text_parts, *family.image_parts)
    source = checkpoint_folder(model.pretrained, parts)
    folder.mkdir(parents=True)
    for part in parts:
        shutil.copytree(source / part, folder / part)
    shutil.copyfile(source / "model_index.json", folder / "model_index.json")
    weights = {name: parameter.detach().cpu() for name, parameter in transformer.named_parameters()}
    write_transformer(transformer, weights, folder / "transformer")
    written = model.model_copy(update={"transformer": folder / "transformer"})
    expected = probe(transformer, family)
    transformer.to("meta")  # two of them may not fit
    again = probe(load_transformer(family.transformer, written, trainer.dtype, trainer.device), family)
    if not torch.equal(expected, again):
        raise CheckpointError(
            "the merged checkpoint does not compute what the merged model does", "please report this."
        )
