"""Samples that exist only as embeddings: another cache folder, or torch files of format 1.0 or 2.0.

A torch file holds one sample as a dictionary. Format 1.0 has no `version` and no `img_shapes`: the shapes follow from
`height` and `width`, `height_control`, `height_control_1`, … in pixels, or from a configured size. Its mask may still
be in pixels. Files are read with `weights_only`: no code in them is ever run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qflux.config import STEP, CacheSource
from qflux.data.cache import EmbeddingCacheManager, Manifest
from qflux.data.encoded import WHOLE, EncodedExample, TextEmbedding, Variant
from qflux.data.examples import EditExample, Listing
from qflux.data.images import ImageFile, shown
from qflux.data.store import file_hash, key_of
from qflux.errors import CacheError, DataError
from qflux.ragged.layout import ImageShape, image_tokens
from qflux.ragged.patches import mask_to_tokens

_REMEDY = "encode the sample again with `qflux cache`, or remove the file."
_NO_CAPTION = Variant(caption=False)


@dataclass(frozen=True)
class StoredSample:
    """A sample as embeddings on disk."""

    id: str
    example: EditExample
    img_shapes: tuple[ImageShape, ...]
    text_tokens: int
    has_mask: bool
    address: str
    """Changes with the embeddings."""
    variants: tuple[Variant, ...]
    load: Callable[[Variant], EncodedExample] = field(compare=False, repr=False)

    @property
    def image_tokens(self) -> int:
        return image_tokens(self.img_shapes)

    @property
    def target_tokens(self) -> int:
        return image_tokens(self.img_shapes[:1])


def read_stored(source: CacheSource, is_prior: bool = False) -> tuple[list[StoredSample], Listing]:
    """All samples of a folder, and what is wrong with the others."""
    listing = Listing(shown(source.path), is_stored=True)
    if not source.path.is_dir():
        raise DataError(f"no folder {source.path}", "check the path of the source.")
    samples = []
    for file in _files(source.path):
        example = EditExample(shown(file.stem), ImageFile(file), "", (), None, listing.source, source.rate, is_prior)
        try:
            read = _from_manifest if file.suffix == ".json" else partial(_from_torch, default=source.default_size)
            samples.append(read(source.path, file, example))
        except CacheError as error:
            listing.fault(shown(file), error.problem, error.remedy)
    listing.examples = [sample.example for sample in samples]
    return samples, listing


def _files(folder: Path) -> Iterator[Path]:
    yield from EmbeddingCacheManager(folder).manifests()
    yield from sorted(file for file in folder.rglob("*.pt") if file.is_file())


def _from_manifest(root: Path, file: Path, example: EditExample) -> StoredSample:
    store = EmbeddingCacheManager(root)
    try:
        manifest = Manifest.parse(file.stem, file.read_text())
    except (OSError, ValueError) as error:
        raise CacheError(f"not the manifest of a sample: {error}", _REMEDY) from None
    if store.manifest(manifest.keys) is None:
        raise CacheError("not all its entries are there", _REMEDY)
    variants = tuple(variant for variant, _, _ in manifest.texts)
    return StoredSample(
        id=manifest.id,
        example=example,
        img_shapes=manifest.img_shapes,
        text_tokens=manifest.text_tokens,
        has_mask=manifest.mask is not None,
        address=manifest.key,
        variants=variants,
        load=partial(store.load, manifest.keys),
    )


def _from_torch(root: Path, file: Path, example: EditExample, default: tuple[int, int] | None) -> StoredSample:
    encoded, empty = read_torch(file, default)
    content = key_of("torch file", file_hash(file), default)
    return StoredSample(
        id=content,
        example=example,
        img_shapes=encoded.img_shapes,
        text_tokens=len(encoded.text.tokens),
        has_mask=encoded.mask is not None,
        address=content,
        variants=(WHOLE, *([_NO_CAPTION] if empty else [])),
        load=partial(_load_torch, file, default),
    )


def _load_torch(file: Path, default: tuple[int, int] | None, variant: Variant) -> EncodedExample:
    encoded, empty = read_torch(file, default)
    if variant == WHOLE:
        return encoded
    if variant == _NO_CAPTION and empty is not None:
        return EncodedExample(encoded.id, empty, encoded.latents, encoded.img_shapes, encoded.mask)
    raise CacheError(f"{file} has no embedding {variant.name}", "set the dropout of captions and controls to 0.")


def read_torch(file: Path, default: tuple[int, int] | None = None) -> tuple[EncodedExample, TextEmbedding | None]:
    """A sample of format 1.0 or 2.0, and its empty prompt if the file has one. `default` is (height, width)."""
    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CacheError(f"{file} is missing", _REMEDY) from None
    except Exception as error:  # the unpickler raises whatever the bytes make it raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CacheError(f"{file} can't be read as tensors: {reason}", _REMEDY) from None
    if not isinstance(values, dict):
        raise CacheError(f"{file} holds a {type(values).__name__}, not the embeddings of a sample", _REMEDY)
    version = str(values.get("version", "1.0"))
    if version not in ("1.0", "2.0"):
        raise CacheError(f"{file} is of format {version}; 1.0 and 2.0 can be read", f"update qflux, or {_REMEDY}")
    try:
        return _parse(file, values, version, default)
    except CacheError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, AttributeError) as error:
        raise CacheError(f"{file} is not a sample of format {version}: {error!r}", _REMEDY) from None


def _parse(
    file: Path, values: Mapping[str, Any], version: str, default: tuple[int, int] | None
) -> tuple[EncodedExample, TextEmbedding | None]:
    for name in ("prompt_embeds", "image_latents"):
        if name not in values:
            raise CacheError(f"{file} has no {name}", _REMEDY)
    target = _single(values["image_latents"], 2, file)
    parts = [_single(values[name], 2, file) for name in _control_names(values)]
    together = torch.cat(parts) if parts else target[:0]
    shapes = (
        _given_shapes(values["img_shapes"])
        if version == "2.0" or "img_shapes" in values
        else _rebuilt_shapes(file, values, len(target), len(together), default)
    )
    counts = [image_tokens([shape]) for shape in shapes]
    if counts[:1] != [len(target)] or sum(counts[1:]) != len(together):
        raise CacheError(
            f"{file}: {len(target)} target and {len(together)} control tokens do not fit the shapes {shapes}", _REMEDY
        )
    mask = values.get("mask")
    encoded = EncodedExample(
        id=key_of("torch file", file.name),
        text=_text(values, "", file),
        latents=(target, *together.split(counts[1:])) if counts[1:] else (target,),
        img_shapes=tuple(shapes),
        mask=None if mask is None else _token_mask(mask, shapes[0], file),
    )
    return encoded, _text(values, "empty_", file) if "empty_prompt_embeds" in values else None


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
            raise CacheError(f"{file} holds a batch of {len(value)} samples; there must be one in a file", _REMEDY)
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
    listed = value.tolist() if isinstance(value, Tensor) else list(value)
    if len(listed) == 1 and not isinstance(listed[0][0], int | float):
        listed = list(listed[0])
    shapes = []
    for shape in listed:
        frames, rows, columns = (int(part) for part in shape)
        shapes.append((frames, rows, columns))
    return shapes


def _rebuilt_shapes(
    file: Path, values: Mapping[str, Any], target: int, controls: int, default: tuple[int, int] | None
) -> list[ImageShape]:
    """Shapes from sizes in pixels. How many controls there are must come out of the token count."""
    size = _pixels(values, "") or default
    if size is None:
        raise CacheError(
            f"{file} is of format 1.0 and does not say its height and width",
            f"set default_size of the source to the size it was made with, or {_REMEDY}",
        )
    shapes = [_shape(size)]
    if not controls:
        return shapes
    own = _pixels(values, "_control")
    counted = _number(values.get("n_controls", 0))
    for first in [own] if own else [size, *([default] if default else [])]:
        found = [first]
        while further := _pixels(values, f"_control_{len(found)}"):
            found.append(further)
        # Some wrote the number of all controls, some that of the further ones; those without a size have the first's.
        for count in (len(found), counted, counted + 1):
            sizes = [*found[:count], *[first] * (count - len(found))]
            if count > 0 and image_tokens([_shape(s) for s in sizes]) == controls:
                return shapes + [_shape(s) for s in sizes]
    raise CacheError(f"{file} is of format 1.0, and the sizes it says do not make {controls} control tokens", _REMEDY)


def _pixels(values: Mapping[str, Any], suffix: str) -> tuple[int, int] | None:
    height, width = values.get(f"height{suffix}"), values.get(f"width{suffix}")
    return None if height is None or width is None else (_number(height), _number(width))


def _number(value: Any) -> int:
    if isinstance(value, Tensor):
        return int(value.flatten()[0])
    return int(value[0]) if isinstance(value, list | tuple) else int(value)


def _shape(size: tuple[int, int]) -> ImageShape:
    return 1, size[0] // STEP, size[1] // STEP


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
            f"{file}: a mask of {tuple(mask.shape)} fits neither {rows}x{columns} tokens nor their pixels", _REMEDY
        )
    return mask_to_tokens(pixels[None])[0]
