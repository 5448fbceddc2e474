"""`qflux export`: from a trained adapter to files for other programs, or into its base."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from qflux.adapters.attach import Weighted
from qflux.adapters.export import probe, require_same_output, save_verified
from qflux.adapters.files import AdapterFile, Record, names_of, read_adapter
from qflux.adapters.merge import merge, write_transformer
from qflux.adapters.publish import write_card, write_merged_card
from qflux.errors import CheckpointError, ConfigError, DataError
from qflux.files.atomic import new_folder, write_json
from qflux.files.hashing import file_hash
from qflux.models.loading import checkpoint_folder, load_transformer
from qflux.models.pretrained import Pretrained
from qflux.models.registry import local_folder

MERGED = "merged"
MERGE_RECORD = "qflux_merge.json"
"""What a merged checkpoint was made from; a folder without it is never replaced."""
MUCH_LOST = 0.1
"""A larger share of the change lost to rounding is worth a word."""


@dataclass(frozen=True)
class Exported:
    """What was written, by its name in a repository, and what there is to say about it."""

    files: dict[str, Path]
    lines: list[str]


def export_adapters(pretrained: Pretrained, adapters: Sequence[Weighted], form: str, target: Path) -> Exported:
    """Write a LoRA in a format, or several into their base (`merged`)."""
    files = [read_adapter(adapter.path) for adapter in adapters]
    for file in files:
        file.require_family(pretrained.family)
        if file.is_product:
            raise CheckpointError(
                f"{file.path} is a LoKr or LoHa, which has no other format", "use it with `qflux predict`."
            )
    if form == MERGED:
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
    if pretrained.settings.quantization:
        raise ConfigError("an export needs the base in full precision", "set model.quantization: null.")
    transformer = pretrained.transformer()
    if form == MERGED:
        return _merged(pretrained, transformer, files, [adapter.weight for adapter in adapters], target)
    return _converted(pretrained, transformer, files[0], form, target)


def _converted(pretrained: Pretrained, transformer: nn.Module, file: AdapterFile, form: str, target: Path) -> Exported:
    family = pretrained.family
    names, layers = names_of(family, transformer), file.layers(family, transformer)
    record = file.record or Record(family.name)
    apart = 0.0

    def compare(written: AdapterFile) -> None:
        nonlocal apart
        again = written.layers(family, transformer)
        apart = require_same_output(transformer, family, layers, again, file.path)

    save_verified(target, layers, form, names, record, compare)
    card = write_card(target.parent, record, family, target.name, pipeline=pretrained.facts.pipeline)
    said = f"{len(layers)} layers as {form}, read back and compared (outputs differ by {apart:.1g}): {target}"
    return Exported({target.name: target, "README.md": card}, [said, str(card)])


def _merged(
    pretrained: Pretrained,
    transformer: nn.Module,
    files: Sequence[AdapterFile],
    weights: Sequence[float],
    target: Path,
) -> Exported:
    """A whole checkpoint: the merged transformer, and every other part as it is."""
    target = target.resolve()
    if target.exists() and any(target.iterdir()) and not (target / MERGE_RECORD).is_file():
        raise DataError(f"--output {target} holds something else than an earlier merge", "give a new folder.")
    name, family, dtype = pretrained.settings.pretrained, pretrained.family, pretrained.settings.dtype
    if target == local_folder(name).resolve():
        raise DataError(f"--output {target} is the base itself", "give a new folder.")
    loras = [file.layers(family, transformer) for file in files]
    report = merge(transformer, list(zip(loras, weights, strict=True)))
    base = Path(name).name if Path(name).exists() else name
    merged = [
        {"file": file.path.name, "sha256": file_hash(file.path), "weight": weight}
        for file, weight in zip(files, weights, strict=True)
    ]
    with new_folder(target) as staging:
        _write_checkpoint(pretrained, transformer, staging)
        write_json(staging / MERGE_RECORD, {"base": base, "dtype": dtype, "adapters": merged})
        write_merged_card(staging, base, pretrained.facts.pipeline, [file.path.name for file in files])
    said = [
        f"{report.layers} layers merged into {dtype}, read back and compared: {target}",
        f"{report.lost:.2%} of the change is lost to rounding",
    ]
    if report.lost > MUCH_LOST:
        said.append("that is much: merge with --set model.dtype=float32, or keep the LoRA apart")
    written = sorted(path for path in target.rglob("*") if path.is_file())
    return Exported({path.relative_to(target).as_posix(): path for path in written}, said)


def _write_checkpoint(pretrained: Pretrained, transformer: nn.Module, folder: Path) -> None:
    """Everything that `from_pretrained` needs; the transformer is read back, and must compute the same."""
    family, model = pretrained.family, pretrained.settings
    parts = ("scheduler", *family.text_parts, *family.image_parts)
    source = checkpoint_folder(model.pretrained, parts)
    for part in parts:
        shutil.copytree(source / part, folder / part)
    shutil.copyfile(source / "model_index.json", folder / "model_index.json")
    weights = {name: parameter.detach().cpu() for name, parameter in transformer.named_parameters()}
    write_transformer(transformer, weights, folder / "transformer")
    written = model.model_copy(update={"transformer": folder / "transformer"})
    expected = probe(transformer, family)
    transformer.to("meta")  # two of them may not fit
    again = probe(load_transformer(family.transformer, written, pretrained.dtype, pretrained.device), family)
    if not torch.equal(expected, again):
        raise CheckpointError(
            "the merged checkpoint does not compute what the merged model does", "please report this."
        )
