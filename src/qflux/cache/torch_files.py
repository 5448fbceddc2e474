"""Samples in torch files of format 1.0 and 2.0, and in the folders in which the original qflux keeps its cache.

A torch file holds a sample as a dictionary, or several with an axis of a batch. Format 1.0 has no `version` and no
`img_shapes`: the shapes follow from `height` and `width`, `height_control`, `height_control_1`, … in pixels, or from a
configured size. Its mask may still be in pixels.

The original writes a file per sample with the names of its tensors, `metadata/<sample>.json`, and a file per tensor,
`<name>/<hash>.pt`. There are no shapes in it: FLUX's position ids tell those of controls.

Files are read with `weights_only`: no code in them is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qflux.data.encoded import EncodedSample, TextEmbedding
from qflux.errors import CacheError
from qflux.files.hashing import file_hash, key_of
from qflux.ragged.patches import mask_to_tokens
from qflux.ragged.shapes import PIXELS_PER_TOKEN as STEP
from qflux.ragged.shapes import ImageShape, Shapes, image_tokens, token_shape

REMEDY = "encode the sample again with `qflux cache`, or remove the file."
METADATA = "metadata"
"""The folder of the original's files about samples."""


@dataclass(frozen=True)
class TorchSample:
    """A sample as it was read."""

    encoded: EncodedSample
    empty: TextEmbedding | None
    """Its empty prompt, if the file has one."""
    rebuilt: str
    """What its shapes were rebuilt from; empty if the file says them."""


def torch_files(folder: Path) -> Iterator[Path]:
    """The files of a folder that stand for samples: what the original keeps, and torch files of their own."""
    described = sorted(file for file in (folder / METADATA).glob("*.json") if file.is_file())
    yield from described
    parts = {key for file in described for key in _described(file)}
    for file in sorted(folder.rglob("*.pt")):
        if file.is_file() and not (file.parent.parent == folder and file.parent.name in parts):
            yield file


def content_of(file: Path) -> str:
    """A hash of everything that a file of `torch_files` stands for."""
    if file.suffix != ".json":
        return file_hash(file)
    return key_of(file_hash(file), [[name, file_hash(part)] for name, part in _parts(file).items()])


def read_torch(file: Path, default: tuple[int, int] | None = None) -> list[TorchSample]:
    """The samples of a file of format 1.0 or 2.0. `default` is (height, width) for those that do not say theirs."""
    values = _load_original(file) if file.suffix == ".json" else _load(file)
    if not isinstance(values, dict):
        raise CacheError(f"{file} holds a {type(values).__name__}, not the embeddings of a sample", REMEDY)
    version = str(values.get("version", "1.0"))
    if version not in ("1.0", "2.0"):
        raise CacheError(f"{file} is of format {version}; 1.0 and 2.0 can be read", f"update qflux, or {REMEDY}")
    try:
        rows = _rows(values)
        return [_parse(file, row, default, padded=len(rows) > 1) for row in rows]
    except CacheError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, AttributeError) as error:
        raise CacheError(f"{file} is not a sample of format {version}: {error!r}", REMEDY) from None


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CacheError(f"{file} is missing", REMEDY) from None
    except Exception as error:  # the unpickler raises whatever the bytes make it raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CacheError(f"{file} can't be read as tensors: {reason}", REMEDY) from None


def _described(file: Path) -> dict[str, Any]:
    """What the original says of a sample; nothing if the file is none of its."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _parts(file: Path) -> dict[str, Path]:
    """The files of a sample's tensors. Names are used as they are: one that leads elsewhere is refused."""
    root, found = file.parent.parent, {}
    for name, value in _described(file).items():
        if isinstance(value, str) and name != "version":
            part = root / name / f"{value}.pt"
            if any(word in (".", "..") or Path(word).name != word for word in (name, value)):
                raise CacheError(f"{file}: {name} leads out of the cache", REMEDY)
            found[name] = part
    return found


def _load_original(file: Path) -> dict[str, Any]:
    described = _described(file)
    tensors = {name: _load(part) for name, part in _parts(file).items()}
    if not tensors:
        raise CacheError(f"{file} names no tensors", REMEDY)
    return {"version": described.get("version", "1.0"), **tensors} | (
        {"img_shapes": described["img_shapes"]} if "img_shapes" in described else {}
    )


def _rows(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of a dictionary, each as if it stood alone; one sample may have an axis of a batch or none."""
    latents = values.get("image_latents")
    count = len(latents) if isinstance(latents, Tensor) and latents.dim() == 3 else 1
    if count == 1:
        return [values]

    def row(value: Any, number: int) -> Any:
        has_rows = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)
        return value[number] if has_rows and len(value) == count else value

    return [{key: row(value, number) for key, value in values.items()} for number in range(count)]


def _parse(file: Path, values: Mapping[str, Any], default: tuple[int, int] | None, padded: bool) -> TorchSample:
    """One sample; if it comes out of a batch, it is padded to the longest there, and its shapes say where it ends."""
    for name in ("prompt_embeds", "image_latents"):
        if name not in values:
            raise CacheError(f"{file} has no {name}", REMEDY)
    target = _single(values["image_latents"], 2, file)
    parts = [_single(values[name], 2, file) for name in _control_names(values)]
    together = torch.cat(parts) if parts else target[:0]
    if "img_shapes" in values:
        shapes, rebuilt = _given_shapes(values["img_shapes"]), ""
        if padded:
            target, together = target[: image_tokens(shapes[:1])], together[: image_tokens(shapes[1:])]
    else:
        shapes, rebuilt = _rebuilt_shapes(file, values, len(target), len(together), default)
    counts = [image_tokens([shape]) for shape in shapes]
    if counts[:1] != [len(target)] or sum(counts[1:]) != len(together):
        raise CacheError(
            f"{file}: {len(target)} target and {len(together)} control tokens do not fit the shapes {shapes}", REMEDY
        )
    mask = values.get("mask")
    if padded and isinstance(mask, Tensor) and mask.dim() == 1:
        mask = mask[: counts[0]]
    encoded = EncodedSample(
        id=key_of("torch file", file.name),
        text=_text(values, "", file),
        target=target,
        shapes=Shapes(tuple(shapes[:1]), tuple(shapes[1:])),
        controls=together.split(counts[1:]) if counts[1:] else (),
        mask=None if mask is None else _token_mask(mask, shapes[0], file),
    )
    empty = _text(values, "empty_", file) if "empty_prompt_embeds" in values else None
    return TorchSample(encoded, empty, rebuilt)


def _text(values: Mapping[str, Any], prefix: str, file: Path) -> TextEmbedding:
    tokens = _single(values[f"{prefix}prompt_embeds"], 2, file)
    mask = values.get(f"{prefix}prompt_embeds_mask")
    if mask is not None:
        tokens = tokens[_single(mask, 1, file).bool()]
    pooled = values.get(f"{prefix}pooled_prompt_embeds")
    return TextEmbedding(tokens, None if pooled is None else _single(pooled, 1, file))


def _single(value: Any, dimensions: int, file: Path) -> Tensor:
    """A tensor without the axis of a batch of one."""
    if not isinstance(value, Tensor):
        raise TypeError(f"a {type(value).__name__} where a tensor should be")
    if value.dim() == dimensions + 1:
        if len(value) != 1:
            raise CacheError(f"{file} holds a batch of {len(value)} samples; there must be one in a file", REMEDY)
        value = value[0]
    if value.dim() != dimensions:
        raise ValueError(f"a tensor of shape {tuple(value.shape)} where {dimensions} axes should be")
    return value


def _control_names(values: Mapping[str, Any]) -> list[str]:
    """The tensors of controls, in order: `control_latents`, which may hold all of them, then `control_latents_1`, …"""
    names = ["control_latents"] if values.get("control_latents") is not None else []
    while values.get(f"control_latents_{len(names)}") is not None and names:
        names.append(f"control_latents_{len(names)}")
    return names


def _given_shapes(value: Any) -> list[ImageShape]:
    """Shapes that a file says itself; the original counts in pixels, `(3, height, width)`, at times."""
    listed = value.tolist() if isinstance(value, Tensor) else list(value)
    if len(listed) == 1 and not isinstance(listed[0][0], int | float):
        listed = list(listed[0])
    shapes: list[ImageShape] = []
    for shape in listed:
        frames, rows, columns = (int(part) for part in shape)
        if rows * columns == 0:  # what fills up a tensor of shapes
            continue
        shapes.append(token_shape(rows, columns) if frames == 3 else (frames, rows, columns))
    return shapes


def _rebuilt_shapes(
    file: Path, values: Mapping[str, Any], target: int, controls: int, default: tuple[int, int] | None
) -> tuple[list[ImageShape], str]:
    """Shapes from sizes in pixels or from position ids, and from what; the token count must come out of them."""
    by_ids = _shapes_from_ids(values.get("control_ids"), controls)
    size, how = _pixels(values, ""), "height and width"
    if size is None and default is not None:
        size, how = default, "default_size"
    if size is None and by_ids and image_tokens(by_ids[:1]) == target:
        return [by_ids[0], *by_ids], "position ids, the target as its first control"
    if size is None:
        raise CacheError(
            f"{file} does not say its height and width",
            f"set default_size of the source to the size it was made with, or {REMEDY}",
        )
    shapes = [token_shape(*size)]
    if not controls:
        return shapes, how
    if by_ids:
        return shapes + by_ids, f"{how}, and position ids"
    own = _pixels(values, "_control")
    counted = _number(values.get("n_controls", 0))
    for first in [own] if own else [size, *([default] if default else [])]:
        found = [first]
        while further := _pixels(values, f"_control_{len(found)}"):
            found.append(further)
        # Some wrote the number of all controls, some that of the further ones; those without a size have the first's.
        # The original's files say nothing: as many controls of the first's size as there are tokens for.
        for count in (len(found), counted, counted + 1, controls // max(1, image_tokens([token_shape(*first)]))):
            sizes = [*found[:count], *[first] * (count - len(found))]
            if count > 0 and image_tokens([token_shape(*s) for s in sizes]) == controls:
                return shapes + [token_shape(*s) for s in sizes], how
    raise CacheError(f"{file}: the sizes it says do not make {controls} control tokens", REMEDY)


def _shapes_from_ids(ids: Any, controls: int) -> list[ImageShape]:
    """The grid of each control, from position ids `(n, 3)` = (control, row, column); nothing if they do not fit."""
    if not isinstance(ids, Tensor) or not controls:
        return []
    flat = ids.reshape(-1, ids.shape[-1]).long()
    domains = flat[:, 0].unique().tolist()
    grids = [flat[flat[:, 0] == domain] for domain in domains]
    shapes = [(1, int(grid[:, 1].max()) + 1, int(grid[:, 2].max()) + 1) for grid in grids]
    return shapes if image_tokens(shapes) == controls == len(flat) else []


def _pixels(values: Mapping[str, Any], suffix: str) -> tuple[int, int] | None:
    height, width = values.get(f"height{suffix}"), values.get(f"width{suffix}")
    return None if height is None or width is None else (_number(height), _number(width))


def _number(value: Any) -> int:
    if isinstance(value, Tensor):
        return int(value.flatten()[0])
    return int(value[0]) if isinstance(value, list | tuple) else int(value)


def _token_mask(mask: Tensor, shape: ImageShape, file: Path) -> Tensor:
    """`(n,)` in [0, 1], from a mask in tokens or in pixels."""
    _, rows, columns = shape
    values = mask.float()
    if values.max() > 1:
        values = values / 255
    if values.numel() == rows * columns:
        return values.reshape(-1)
    pixels = values.reshape(values.shape[-2:])
    if pixels.shape != (rows * STEP, columns * STEP):
        raise CacheError(
            f"{file}: a mask of {tuple(mask.shape)} fits neither {rows}x{columns} tokens nor their pixels", REMEDY
        )
    return mask_to_tokens(pixels[None])[0]
