"""`qflux cache`: encode every sample once, write what training needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qflux.config import Config
from qflux.data.cache import VERSION, EmbeddingCacheManager, SampleKeys
from qflux.data.encoded import Prompt
from qflux.data.geometry import ExtremeAspectError, ImageProcessor, Transform
from qflux.data.images import image_size, load_mask, load_rgb, to_pixels
from qflux.data.sources import EditExample, read_folder
from qflux.data.store import key_of
from qflux.errors import CacheError, DataError, QfluxError, collected
from qflux.models.family import Encoder, Family, text_limit
from qflux.models.loading import checkpoint_folder, identity
from qflux.ragged.patches import mask_to_tokens, token_shape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedSample:
    """A sample, how its images are transformed, and where its embeddings belong."""

    example: EditExample
    transforms: tuple[Transform, ...]
    """One per image, target first."""
    views: tuple[Transform | None, ...]
    """One per control: how the text encoder sees it, if it does."""
    keys: SampleKeys


@dataclass
class CacheReport:
    """What `qflux cache` did."""

    samples: int = 0
    new_entries: int = 0
    reused_entries: int = 0
    skipped: list[str] = field(default_factory=list)
    cut: int = 0
    """Prompts that were longer than allowed, and were cut."""


Progress = Callable[[int, int], None]


class SamplePlanner:
    """Decides for every sample of a config which transforms and which cache entries it has; opens headers only."""

    def __init__(self, config: Config, family: Family, cache: EmbeddingCacheManager) -> None:
        self._config = config
        self._family = family
        self._cache = cache
        self._processor = ImageProcessor(config.data.processor)
        self.skipped: list[str] = []
        self.cropped: list[str] = []
        folder = checkpoint_folder(config.model.pretrained, (*family.text_parts, *family.image_parts))
        self._text_identity = identity(folder, family.text_parts, cache.hash_of)
        self._image_identity = identity(folder, family.image_parts, cache.hash_of)

    def plan(self) -> list[PlannedSample]:
        """All usable samples, in an order that depends on their content alone. All faults are reported together."""
        planned, problems = [], []
        for example in read_folder(self._config.data.path):
            try:
                planned.append(self._plan_one(example))
            except ExtremeAspectError as error:
                if self._config.data.processor.on_extreme_aspect == "error":
                    problems.append(f"{error.problem}; {error.remedy}")
                else:
                    self.skipped.append(error.problem)
            except DataError as error:
                problems.append(error.problem)
        if self.cropped:
            logger.warning(
                "%d first controls have another aspect ratio than their target and are cropped to it: %s",
                len(self.cropped),
                ", ".join(self.cropped[:10]),
            )
        for reason in self.skipped:
            logger.warning("skipped: %s", reason)
        if problems:
            raise collected(DataError, f"samples in {self._config.data.path} can't be used", problems)
        if not planned:
            raise DataError(f"no usable sample in {self._config.data.path}: all {len(self.skipped)} were skipped")
        return sorted(planned, key=lambda sample: sample.keys.id)

    def _plan_one(self, example: EditExample) -> PlannedSample:
        self._family.check_controls(len(example.controls), str(example.target))
        target_size = image_size(example.target)
        target = self._processor.target(*target_size, name=str(example.target))
        transforms, views = [target], []
        for index, control in enumerate(example.controls):
            size = image_size(control)
            if index == 0:
                self._processor.check_aspect(*size, str(control))
                if target.crops(*size):
                    self.cropped.append(control.name)
            transforms.append(target if index == 0 else self._processor.control(index - 1, *size, str(control)))
            views.append(self._family.prompt_view(index, size, transforms[-1]))
        if example.mask and image_size(example.mask) != target_size:
            sizes = " and ".join("{}x{}".format(*image_size(path)) for path in (example.mask, example.target))
            raise DataError(f"{example.mask}: the mask and its target differ in size: {sizes}")
        return PlannedSample(example, tuple(transforms), tuple(views), self._keys(example, transforms, views))

    def _keys(self, example: EditExample, transforms: list[Transform], views: list[Transform | None]) -> SampleKeys:
        hash_of, dtype = self._cache.hash_of, self._config.model.dtype
        images = (example.target, *example.controls)
        content = [hash_of(path) for path in images]
        mask = hash_of(example.mask) if example.mask else None
        length = text_limit(self._config, self._family).tokens
        seen = [(digest, view.key) for digest, view in zip(content[1:], views, strict=True) if view]
        prompt = (self._family.name, example.prompt, seen, length)
        return SampleKeys(
            id=key_of("id", content, example.prompt, mask),
            text=key_of("text", VERSION, prompt, self._text_identity, dtype),
            images=tuple(
                key_of("image", VERSION, digest, transform.key, self._image_identity, dtype)
                for digest, transform in zip(content, transforms, strict=True)
            ),
            img_shapes=tuple(token_shape(*transform.size) for transform in transforms),
            mask=key_of("mask", VERSION, mask, transforms[0].key) if mask else None,
        )


def fill_cache(
    planned: list[PlannedSample], encoder: Encoder, cache: EmbeddingCacheManager, progress: Progress | None = None
) -> CacheReport:
    """Encode what is missing. Interrupted at any point, a second run goes on where this one was."""
    report = CacheReport(samples=len(planned))
    for index, sample in enumerate(planned):
        for kind, key, make in _entries(sample, encoder):
            if cache.ensure(kind, key, make):
                report.new_entries += 1
            else:
                report.reused_entries += 1
        if not cache.is_complete(sample.keys):
            cache.complete(sample.keys)
        if progress:
            progress(index + 1, len(planned))
    cache.remember_hashes()
    return report


def require_complete(planned: list[PlannedSample], cache: EmbeddingCacheManager) -> None:
    """An error that names the samples whose embeddings are missing."""
    missing = [sample.example.name for sample in planned if not cache.is_complete(sample.keys)]
    if missing:
        error: QfluxError = collected(
            CacheError,
            f"{len(missing)} of {len(planned)} samples are not in the cache {cache.root}",
            missing,
            "run `qflux cache` with the same config first.",
        )
        raise error


def _entries(sample: PlannedSample, encoder: Encoder) -> list[tuple[str, str, Callable[[], Mapping[str, Tensor]]]]:
    """Kind, key and recipe of every entry of a sample; a recipe runs only if the entry is missing."""
    example, keys = sample.example, sample.keys

    def text() -> Mapping[str, Tensor]:
        seen = zip(example.controls, sample.views, strict=True)
        images = tuple(view(load_rgb(path)) for path, view in seen if view)
        try:
            embedding = encoder.encode_text([Prompt(example.prompt, images=images)])[0]
        except DataError as error:
            raise DataError(f"{example.name}: {error.problem}", error.remedy) from None
        return {"tokens": embedding.tokens} | ({} if embedding.pooled is None else {"pooled": embedding.pooled})

    def image(path: Path, transform: Transform) -> Mapping[str, Tensor]:
        return {"latents": encoder.encode_image(to_pixels(transform(load_rgb(path))))}

    entries: list[tuple[str, str, Callable[[], Mapping[str, Tensor]]]] = [("text", keys.text, text)]
    paths = (example.target, *example.controls)
    for path, transform, key in zip(paths, sample.transforms, keys.images, strict=True):
        entries.append(("image", key, lambda p=path, t=transform: image(p, t)))  # type: ignore[misc]
    if keys.mask and example.mask:
        mask_path = example.mask
        entries.append(("mask", keys.mask, lambda: {"mask": _token_mask(mask_path, sample.transforms[0])}))
    return entries


def _token_mask(path: Path, transform: Transform) -> Tensor:
    grey = transform(load_mask(path), fill="black")
    return mask_to_tokens(torch.from_numpy(np.array(grey, dtype=np.float32))[None] / 255)[0]
