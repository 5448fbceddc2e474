"""From a trained adapter to files for other programs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from qflux.adapters.attach import Weighted
from qflux.adapters.export import merge, probe, require_same_output, save_verified, write_transformer
from qflux.adapters.files import AdapterFile, Record, names_of, read_adapter
from qflux.adapters.publish import write_card, write_merged_card
from qflux.errors import CheckpointError, ConfigError, DataError
from qflux.files.atomic import write_json
from qflux.files.hashing import file_hash
from qflux.models.loading import checkpoint_folder, load_transformer
from qflux.models.shipped import local_folder

if TYPE_CHECKING:
    from torch import nn

    from qflux.commands import Trainer

MERGE_RECORD = "qflux_merge.json"
"""What a merged checkpoint was made from; a folder without it is never replaced."""
MUCH_LOST = 0.1
"""A larger share of the change lost to rounding is worth a word."""


@dataclass(frozen=True)
class Exported:
    """What was written, by its name in a repository, and what there is to say about it."""

    files: dict[str, Path]
    lines: list[str]


def export_adapters(
    trainer: Trainer, adapters: Sequence[Weighted], form: Literal["diffusers", "comfyui", "merged"], target: Path
) -> Exported:
    """Write a LoRA in a format, or several into their base."""
    files = [read_adapter(adapter.path) for adapter in adapters]
    for file in files:
        file.require_family(trainer.family)
        if file.is_product:
            raise CheckpointError(
                f"{file.path} is a LoKr or LoHa, which has no other format", "use it with `qflux predict`."
            )
    if form == "merged":
        if target.is_file() or target.suffix == ".safetensors":
            raise DataError(f"--output {target} is a file", "a merged checkpoint is a folder.")
    elif len(files) > 1 or adapters[0].weight != 1.0:
        raise DataError(
            f"--format {form} writes one LoRA as it is", "use --format merged for several, or for another strength."
        )
    elif target.suffix != ".safetensors":
        raise DataError(f"--output {target} is no .safetensors file", "give a name that ends in .safetensors.")
    elif any(target.resolve() == file.path.resolve() for file in files):
        raise DataError(f"--output {target} is the LoRA itself", "give another name.")
    model = trainer.config.model
    if model.quantization:
        raise ConfigError("an export needs the base in full precision", "set model.quantization: null.")
    transformer = load_transformer(trainer.family.transformer, model, trainer.dtype, trainer.device)
    if form == "merged":
        return _merged(trainer, transformer, files, [adapter.weight for adapter in adapters], target)
    return _converted(trainer, transformer, files[0], form, target)


def _converted(
    trainer: Trainer, transformer: nn.Module, file: AdapterFile, form: Literal["diffusers", "comfyui"], target: Path
) -> Exported:
    names = names_of(trainer.family, transformer)
    layers = file.layers(trainer.family, transformer)
    record = file.record or Record(trainer.family.name)
    apart = 0.0

    def compare(written: AdapterFile) -> None:
        nonlocal apart
        again = written.layers(trainer.family, transformer)
        apart = require_same_output(transformer, trainer.family, layers, again)

    save_verified(target, layers, form, names, record, compare)
    card = write_card(target.parent, record, trainer.family, target.name)
    said = f"{len(layers)} layers as {form}, read back and compared (outputs differ by {apart:.1g}): {target}"
    return Exported({target.name: target, "README.md": card}, [said, str(card)])


def _merged(
    trainer: Trainer, transformer: nn.Module, files: Sequence[AdapterFile], weights: Sequence[float], target: Path
) -> Exported:
    """A whole checkpoint: the merged transformer, and every other part as it is."""
    target = target.resolve()
    if target.exists() and any(target.iterdir()) and not (target / MERGE_RECORD).is_file():
        raise DataError(f"--output {target} holds something else than an earlier merge", "give a new folder.")
    if target == local_folder(trainer.config.model.pretrained).resolve():
        raise DataError(f"--output {target} is the base itself", "give a new folder.")
    loras = [file.layers(trainer.family, transformer) for file in files]
    report = merge(transformer, list(zip(loras, weights, strict=True)))
    staging, former = (target.with_name(f".{target.name}.{kind}") for kind in ("tmp", "former"))
    shutil.rmtree(staging, ignore_errors=True)
    try:
        _write_checkpoint(trainer, transformer, staging)
        pretrained = trainer.config.model.pretrained
        base = Path(pretrained).name if Path(pretrained).exists() else pretrained
        merged = [
            {"file": file.path.name, "sha256": file_hash(file.path), "weight": weight}
            for file, weight in zip(files, weights, strict=True)
        ]
        write_json(staging / MERGE_RECORD, {"base": base, "dtype": trainer.config.model.dtype, "adapters": merged})
        write_merged_card(staging, base, trainer.family.pipeline, [file.path.name for file in files])
        _swap(staging, target, former)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    said = [
        f"{report.layers} layers merged into {trainer.config.model.dtype}, read back and compared: {target}",
        f"{report.lost:.2%} of the change is lost to rounding",
    ]
    if report.lost > MUCH_LOST:
        said.append("that is much: merge with --set model.dtype=float32, or keep the LoRA apart")
    written = sorted(path for path in target.rglob("*") if path.is_file())
    return Exported({path.relative_to(target).as_posix(): path for path in written}, said)


def _swap(new: Path, target: Path, former: Path) -> None:
    """`new` takes the place of `target`, which is gone only when that has worked."""
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    try:
        new.rename(target)
    except OSError:
        if former.exists():
            former.rename(target)
        raise
    shutil.rmtree(former, ignore_errors=True)


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
