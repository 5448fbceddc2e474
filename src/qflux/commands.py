"""What the command line and Python call: START HERE.

    qflux inspect  `Trainer.inspect`  what is in the data
    qflux check    `Trainer.check`    what would go wrong
    qflux cache    `Trainer.cache`    samples on disk become embeddings on disk
    qflux fit      `Trainer.fit`      embeddings become a LoRA; the loop is in `training.loop`
    qflux predict  `Trainer.predict`  an image and a prompt become an edited image
    qflux export   `Trainer.export`   a LoRA becomes a file for other programs

A batch holds samples of any sizes. Its tokens are concatenated, not padded; see `qflux.ragged.layout` for how
attention, modulation and positions keep the samples apart.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from pydantic import ValidationError

from qflux.adapters.attach import Weighted
from qflux.adapters.convert import MERGED, Exported, export_adapters
from qflux.cache.build import CacheReport, build_cache
from qflux.cache.build import Listener as CacheListener
from qflux.cache.cache import EmbeddingCacheManager
from qflux.cache.samples import count_text, longest_text, read_samples, require_complete
from qflux.cache.stored import read_stored
from qflux.config import Config
from qflux.config.sampling import PredictSettings
from qflux.data.dataset import Dataset
from qflux.data.images.sizes import AskedSize
from qflux.data.lint.inspect import Inspected, inspect
from qflux.data.sample import Sample
from qflux.errors import CheckpointError, ConfigError
from qflux.losses.distribution import Curve, level_curves, visited_sizes
from qflux.losses.timesteps import NoiseLevels
from qflux.models.family import Family, TextCount
from qflux.models.precision import settled
from qflux.models.pretrained import Pretrained, device_of
from qflux.models.registry import get_family
from qflux.runs.metrics import Listener
from qflux.runs.paths import RunPaths
from qflux.sampling.predictor import Edit, Predictor, load_predictor
from qflux.training.fit import fit
from qflux.training.loop import FitResult
from qflux.training.preflight.check import Check, check

logger = logging.getLogger(__name__)

StageProgress = Callable[[str, int, int], None]
"""Is told how far something is: stage, done, total."""


class Trainer:
    """Everything that can be done with a config. Subclasses bind it to a family.

    What differs between families is in the `Family`.
    """

    family_name: ClassVar[str | None] = None

    def __init__(self, config: Config) -> None:
        if self.family_name not in (None, config.family):
            raise ConfigError(f"{type(self).__name__} trains {self.family_name}, the config says {config.family}")
        self.config = config = settled(config, device_of(config.model.device))
        self.family: Family = get_family(config.family)
        self.pretrained = Pretrained(config, self.family)
        self.store = EmbeddingCacheManager(config.cache_dir)
        self.paths = RunPaths(config.run_dir)

    @property
    def device(self) -> torch.device:
        return self.pretrained.device

    @property
    def dtype(self) -> torch.dtype:
        return self.pretrained.dtype

    def inspect(self, progress: StageProgress | None = None) -> Inspected:
        """Look at the data; nothing is changed, and nothing that is wrong stops the look."""
        try:
            count, estimated = self.pretrained.text_counter(), False
        except CheckpointError as error:
            logger.warning("prompt lengths are estimated: %s", error.problem)
            count, estimated = _estimated_length, True

        def length(sample: Sample) -> tuple[int, int]:
            counted = longest_text(sample, count)
            return counted.used, counted.wanted

        # An estimate is no reason to complain.
        limit = sys.maxsize if estimated else self.pretrained.text_limit.tokens
        inspected = inspect(self.config, self.family, self.store.index, length, limit, read_stored, progress)
        inspected.summary.text_is_estimated = estimated
        return inspected

    def level_curves(self, samples: Sequence[Sample]) -> dict[str, Curve]:
        """How often training on samples will draw which noise level, by name; nothing if that is not known here."""
        settings = self.config.loss.timesteps
        try:
            levels = NoiseLevels(settings)
            if settings.shift == "resolution":
                shift, steps = self.family.noise_shift(self.pretrained.scheduler()), self.pretrained.facts
                levels = NoiseLevels(settings, shift, steps.num_inference_steps)
        except CheckpointError as error:
            logger.warning("noise levels are not drawn: %s", error.problem)
            return {}
        return level_curves(levels, visited_sizes(samples)) if samples else {}

    def check(self, progress: StageProgress | None = None) -> Iterator[Check]:
        """Look at everything about a run that needs no weights; what is wrong does not stop the look."""
        return check(self.config, self.pretrained, self.store, self.inspect(progress))

    def cache(self, listener: CacheListener | None = None) -> CacheReport:
        """Encode every sample that is not in the cache yet. Several processes may do this at the same time."""
        self.pretrained.require_family()
        return build_cache(self.config, self.pretrained, self.store, listener)

    def samples(self) -> Dataset:
        """The samples of the config, with the length of their prompts; all of them cached, if the cache is used."""
        self.pretrained.require_family()
        dataset = read_samples(self.config, self.family, self.store)
        if self.config.cache.use_cache:
            require_complete(dataset, self.store, self.config)
        elif dataset.from_images:
            count_text(dataset, self.pretrained.text_counter())
        if self.config.loss.kind == "mask" and not any(sample.has_mask for sample in dataset.training):
            logger.warning("loss.kind is mask, but no sample has a mask: everything counts as edited")
        if self.config.loss.preserve.weight > 0:
            _require_something_to_preserve(dataset, self.config.loss.preserve.toward)
        return dataset

    def fit(self, listener: Listener | None = None, accept_data_change: bool = False) -> FitResult:
        """Train on the samples, going on from the newest checkpoint if there is one.

        If its samples are not these, that is an error, unless `accept_data_change` says that it should go on with them.
        """
        return fit(self.config, self.pretrained, self.samples(), listener, accept_data_change)

    def predict(
        self,
        images: Sequence[Sequence[Image.Image]],
        prompts: Sequence[str],
        *,
        lora: str | Path | Sequence[Weighted] | None = None,
        lora_scale: float = 1.0,
        size: AskedSize = None,
        seeds: Sequence[int] | None = None,
        **options: Any,
    ) -> list[Image.Image]:
        """Edit images: per prompt its control images (the first one is the image to edit), of any sizes.

        `lora` is an adapter file or folder, or several with a weight each. `size` is `(height, width)` of the results
        or "input", as large as the first control; the default is `predict.size`, and then the first control's size
        after preprocessing. `seeds` has one entry per prompt; the default is `predict.seed` for each. `options` take
        the place of settings of `predict`: `num_inference_steps=8`, `guidance_scale=2.5`, `negative_prompt="blurry"`.
        """
        settings = self._predict_settings(options)
        size = settings.size if size is None else size
        seeds = seeds if seeds is not None else [settings.seed] * len(prompts)
        if not len(images) == len(prompts) == len(seeds):
            raise ValueError(
                f"{len(images)} image lists, {len(prompts)} prompts and {len(seeds)} seeds: one of each per edit"
            )
        edits = [
            Edit(tuple(controls), prompt, negative_prompt=settings.negative_prompt, seed=seed, size=size)
            for controls, prompt, seed in zip(images, prompts, seeds, strict=True)
        ]
        adapters = [Weighted(Path(lora).expanduser(), lora_scale)] if isinstance(lora, str | Path) else lora or ()
        config = self.config.model_copy(update={"predict": settings})
        return load_predictor(self.pretrained, config, adapters)(edits)

    def _predict_settings(self, options: dict[str, Any]) -> PredictSettings:
        """The config's, with other values for some; what is not right about those is a `ConfigError`."""
        try:
            return PredictSettings.model_validate({**self.config.predict.model_dump(), **options})
        except ValidationError as error:
            first = error.errors()[0]
            name, value = ".".join(map(str, first["loc"])), repr(first.get("input"))[:80]
            raise ConfigError(f"predict.{name}: {first['msg']}, and it is {value}") from None

    def predictor(self, adapters: Sequence[Weighted] = ()) -> Predictor:
        """Everything loaded for predictions, with any number of adapters."""
        return load_predictor(self.pretrained, self.config, adapters)

    def export(self, adapters: Sequence[Weighted], form: str, target: Path | None = None) -> Exported:
        """Write a LoRA in another format, or several into their base ("merged"); by default below the run's folder."""
        name = MERGED if form == MERGED else f"{self.config.run_name}-{form}.safetensors"
        return export_adapters(self.pretrained, adapters, form, target or self.paths.exports / name)


def bound_trainer(name: str, family: str) -> type[Trainer]:
    """A trainer class that takes configs of one family only."""
    return type(name, (Trainer,), {"family_name": family, "__doc__": f"`Trainer` for the family {family}."})


def _estimated_length(prompt: str, sizes: Sequence[tuple[int, int]]) -> TextCount:
    """About four letters a token, and one token for 28 x 28 pixels."""
    tokens = len(prompt) // 4 + 1 + sum(height * width // 28**2 for height, width in sizes)
    return TextCount(tokens, tokens)


def _require_something_to_preserve(dataset: Dataset, toward: str) -> None:
    masked = [sample for sample in dataset.training if sample.has_mask]
    if not masked:
        raise ConfigError(
            "loss.preserve.weight is set, but no sample has a mask: everything counts as edited",
            "add masks (docs/data.md); `qflux inspect --masks FOLDER` makes them from what differs.",
        )
    alike = [sample for sample in masked if sample.shapes.controls[:1] == sample.shapes.targets]
    if toward == "control" and not alike:
        raise ConfigError(
            "loss.preserve.toward is control, but no sample with a mask has a first control of its target's size",
            "set loss.preserve.toward: base.",
        )
