"""The commands: START HERE.

    qflux cache   `Trainer.cache`    samples on disk become embeddings on disk
    qflux fit     `Trainer.fit`      embeddings become a LoRA; the loop is in `training.run`
    qflux predict `Trainer.predict`  an image and a prompt become an edited image

A batch holds samples of any sizes. Its tokens are concatenated, not padded; see `qflux.ragged.layout` for how
attention, modulation and positions keep the samples apart.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import nn

from qflux.adapters.attach import Weighted, attach_all
from qflux.adapters.files import Record, read_adapter
from qflux.cache.build import CacheFiller, CacheReport
from qflux.cache.build import Listener as CacheListener
from qflux.cache.cache import EmbeddingCacheManager
from qflux.config import Config, ProcessorSettings, load_config
from qflux.data.dataset import SizedExample
from qflux.data.images.sizes import AskedSize
from qflux.data.lint.inspect import Inspected, inspect
from qflux.errors import CheckpointError, ConfigError, DataError, collected
from qflux.files.locks import Claims, exclusive
from qflux.losses.timesteps import NoiseLevels, NoiseShift
from qflux.models import Family, get_family
from qflux.models.family import Encoder, TextCount, TextCounter, text_limit
from qflux.models.loading import load_transformer
from qflux.runs.metrics import Listener
from qflux.sampling.predictor import Edit, Predictor
from qflux.sampling.prepare import Preparer
from qflux.training.batches import FromCache, FromImages, Provider, training_plan
from qflux.training.checkpoint import Checkpoints
from qflux.training.distributed import World
from qflux.training.encode import (
    PlannedSet,
    circumstances,
    encoders_name,
    is_refused,
    plan_samples,
    require_complete,
    require_fitting,
)
from qflux.training.loop import FitResult, Run
from qflux.training.model import TrainedModel
from qflux.training.optimizer.build import build_schedule
from qflux.training.preflight.rehearsal import require_parts
from qflux.training.resume_guard import (
    DATA,
    NOISE_SHIFT,
    STEPS,
    data_changes,
    data_identity,
    known_starts,
    path_settings,
    planned_steps,
)
from qflux.training.signals import deferred_signals, repeatable
from qflux.training.validation import PreparedEdit, prepare_own

logger = logging.getLogger(__name__)


class Trainer:
    """The shared trainer. Subclasses bind it to a family; what differs between families is in the `Family`."""

    family_name: ClassVar[str | None] = None

    def __init__(self, config: Config) -> None:
        if self.family_name not in (None, config.family):
            raise ConfigError(f"{type(self).__name__} trains {self.family_name}, the config says {config.family}")
        self.config = config
        self.family: Family = get_family(config.family)
        self.device = _device(config.model.device)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.store = EmbeddingCacheManager(config.cache_dir)
        self.text_limit = text_limit(config, self.family)

    def inspect(self, progress: Callable[[str, int, int], None] | None = None) -> Inspected:
        """Look at the data; nothing is changed, and nothing that is wrong stops the look."""
        try:
            count, estimated = self.text_counter(), False
        except CheckpointError as error:
            logger.warning("prompt lengths are estimated: %s", error.problem)
            count, estimated = _estimated_length, True

        def length(sample: SizedExample) -> tuple[int, int]:
            counted = count(sample.example.prompt, [view.size for view in sample.views if view])
            return counted.used, counted.wanted

        limit = sys.maxsize if estimated else self.text_limit.tokens  # an estimate is no reason to complain
        inspected = inspect(self.config, self.family, self.store.index, length, limit, progress)
        inspected.summary.text_is_estimated = estimated
        return inspected

    def cache(self, listener: CacheListener | None = None) -> CacheReport:
        """Encode every sample that is not in the cache yet. Several processes may do this at the same time."""
        claims = Claims(self.store.root)
        try:
            with claims.turn():  # the first one reads the images' headers, the others its index
                planned = plan_samples(self.config, self.family, self.store, fetch_encoders=True)
            filler = CacheFiller(
                self.store,
                self._encoder,
                (self.family.text_channels * self.dtype.itemsize, self.family.image_channels * self.dtype.itemsize),
                self.config.cache.batch_size,
                self.config.data.num_workers,
                listener,
                circumstances(self.config),
            )
            with claims.sharing() as staging:
                self.store.remember_encoders(encoders_name(self.config), planned.encoders, staging)
                report = filler.fill(planned.from_images, self.text_limit.tokens, claims, staging)
            self._refuse_cut_prompts(planned, report)
        finally:
            claims.close()
        report.skipped = [*map(str, planned.faults), *report.failed]
        if listener:
            listener.finished(report)
        if report.failed and self.config.data.on_bad_sample == "error":
            raise collected(
                DataError,
                f"{len(report.failed)} of {len(planned.all)} samples can't be encoded; the others are cached",
                report.failed,
                "mend them, or set data.on_bad_sample: skip to train without them.",
            )
        for reason in report.failed:
            logger.warning("skipped: %s", reason)
        return report

    def _refuse_cut_prompts(self, planned: PlannedSet, report: CacheReport) -> None:
        """Count prompts that were cut; those that only an earlier run with another setting has cut are failures."""
        for sample in planned.from_images:
            manifest = self.store.manifest(sample.keys)
            report.cut += manifest is not None and manifest.is_cut
            if manifest is not None and is_refused(manifest, self.config):
                report.samples -= 1
                report.failed.append(f"{sample.example.name}: its prompt is longer than allowed, and was cut")

    def samples(self) -> PlannedSet:
        """The samples of the config; all of them cached, if the cache is used."""
        planned = plan_samples(self.config, self.family, self.store)
        if self.config.cache.use_cache:
            require_complete(planned, self.store, self.config)
        if self.config.loss.use_mask_loss and not any(sample.has_mask for sample in planned.training):
            logger.warning("loss.use_mask_loss is on, but no sample has a mask: everything counts as edited")
        return planned

    def fit(self, listener: Listener | None = None, accept_data_change: bool = False) -> FitResult:
        """Train on the samples, going on from the newest checkpoint if there is one.

        If its samples are not these, that is an error, unless `accept_data_change` says that it should go on with them.
        """
        config, world = self.config, World.join()
        planned = self.samples()
        provider = self._provider(planned)
        plan = training_plan(config, planned.training, provider, world.size)
        identity = data_identity(config, planned.training, world.size)
        checkpoints = Checkpoints(config.run_dir / "checkpoints", config.train.keep_checkpoints, world=world)
        before = checkpoints.before()
        plan.starts = known_starts(before, identity) or plan.starts
        total = plan.total_steps(config.train.max_train_steps, config.train.num_epochs)
        if total == 0:
            raise ConfigError("no sample is due in the epochs to train", "raise train.num_epochs or the weights.")
        levels, schedule = self._noise_levels(before)
        checkpoints.settings = path_settings(config, total) | identity | schedule
        checkpoints.may_differ = frozenset({STEPS, DATA})
        world.first(lambda: checkpoints.require_usable(total))
        changed = data_changes(before, identity, config.run_dir / "ledger.jsonl", planned.training)
        if changed and not accept_data_change:
            raise CheckpointError(
                changed,
                "--accept-data-change goes on with them (a new epoch begins); another run_name begins anew.",
            )
        if changed:
            logger.warning("%s; a new epoch begins with them", changed)
        self._tell_of_length(before, total)
        require_parts(config, self.family, total)
        start = config.lora.init_from if before is None and config.train.method == "lora" else None
        if config.lora.init_from and before is not None:
            logger.info("lora.init_from was the start of this run, which goes on from its checkpoint")
        if start:
            read_adapter(start).require_family(self.family)  # before anything large is loaded
        own = self._own_edits()
        logger.info("%d samples, %d steps, %d processes", len(planned.training), total, world.size)

        with ExitStack() as held:
            world.first(lambda: held.enter_context(exclusive(config.run_dir)))
            held.enter_context(repeatable(config.train.deterministic))
            model = TrainedModel(self._transformer(world), self.family, config, world, self.device, start)
            require_fitting(planned, model.transformer)
            stop = held.enter_context(
                deferred_signals()
            )  # until here there is nothing to save, and stopping is at once
            run = Run(
                config,
                world,
                planned,
                provider,
                plan,
                total,
                model,
                checkpoints,
                levels,
                self._decoder,
                self.device,
                stop,
                listener,
                own,
            )
            return run()

    def _own_edits(self) -> list[PreparedEdit]:
        """What `validation.edits` asks for, encoded; the encoders are gone before the transformer comes."""
        if not self.config.validation.edits:
            return []
        prepare = Preparer(
            self.family, self._encoder("text", "image"), self.config.data.processor, self.device, self.dtype
        )
        try:
            return prepare_own(self.config, prepare)
        finally:
            del prepare
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _tell_of_length(self, before: Mapping[str, Any] | None, total: int) -> None:
        """Say what becomes of a learning rate whose schedule was made for another number of steps."""
        steps = planned_steps(before)
        if before is None or steps in (None, total):
            return
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        was, now = (
            build_schedule(self.config.train, optimizer, length).factor(before["step"]) for length in (steps, total)
        )
        logger.warning(
            "the run was planned for %d steps and is now for %d: lr_scheduler %s stretches over all of them; "
            "at step %d the learning rate goes from %.3g to %.3g of its full value",
            steps,
            total,
            self.config.train.lr_scheduler,
            before["step"],
            was,
            now,
        )

    def _noise_levels(self, before: Mapping[str, Any] | None) -> tuple[NoiseLevels, dict[str, object]]:
        """Noise levels on the model's own schedule, and what a checkpoint records of it.

        A run that began on another schedule, as `before` tells, stays on that one.
        """
        timesteps = self.config.loss.timesteps
        if timesteps.shift != "resolution":
            return NoiseLevels(timesteps), {}
        components = self.family.load(self.config.model.pretrained, ("scheduler",), self.dtype, self.device)
        own = began = NoiseShift.of(components.scheduler)
        if before is not None:
            # Until 0.1.0 every family trained on FLUX.1's schedule, and nothing was recorded.
            recorded = before["settings"].get(NOISE_SHIFT)
            try:
                began = NoiseShift(**recorded) if recorded else NoiseShift()
            except TypeError as error:
                raise CheckpointError(
                    f"{self.config.run_dir} has a noise schedule that this version does not know: {error}",
                    "update qflux, or choose another run_name.",
                ) from None
        if began != own:
            logger.warning(
                "this run began on a noise schedule with a shift of %s and goes on with it; that of %s is %s: "
                "a run of another name takes it",
                began,
                self.config.model.pretrained,
                own,
            )
        is_old = before is not None and NOISE_SHIFT not in before["settings"]
        return NoiseLevels(timesteps, began), {} if is_old else {NOISE_SHIFT: asdict(began)}

    def _decoder(self) -> tuple[Encoder, Any]:
        """What turns latents into pictures, and the schedule to make them on."""
        components = self.family.load(self.config.model.pretrained, ("scheduler",), self.dtype, self.device)
        return self._encoder("image"), components.scheduler

    def predict(
        self,
        images: Sequence[Sequence[Image.Image]],
        prompts: Sequence[str],
        *,
        lora: str | Path | Sequence[Weighted] | None = None,
        lora_scale: float = 1.0,
        size: AskedSize = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Image.Image]:
        """Edit images: per prompt its control images (the first one is the image to edit), of any sizes.

        `lora` is an adapter file or folder, or several with a weight each. `size` is `(height, width)` of the results
        or "input", as large as the first control; the default is `predict.size`, and then the first control's size
        after preprocessing. `seeds` has one entry per prompt; the default is `predict.seed` for each.
        """
        settings = self.config.predict
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
        return self.predictor(adapters)(edits)

    def predictor(self, adapters: Sequence[Weighted] = ()) -> Predictor:
        """Everything loaded for predictions, with any number of adapters."""
        parts = ("scheduler", *self.family.text_parts, *self.family.image_parts)
        components = self.family.load(self.config.model.pretrained, parts, self.dtype, self.device)
        components.transformer = load_transformer(self.family.transformer, self.config.model, self.dtype, self.device)
        records = attach_all(components.transformer, self.family, adapters) if adapters else []
        return Predictor(self.family, components, self.config, self._preprocessing(records))

    def _preprocessing(self, records: Sequence[Record]) -> ProcessorSettings | None:
        """How images reach their size; nothing: as in the reference pipeline."""
        if self.config.predict.preprocessing == "config":
            return self.config.data.processor
        known = [_preprocessing_of(record) for record in records if record.preprocessing]
        if not known or self.config.predict.preprocessing == "pipeline":
            return None
        recorded, *others = known
        if any(other != recorded for other in others):
            logger.warning("the LoRAs were trained with different preprocessing; the first one's is used")
        try:
            return load_config(
                {**self.config.dump(), "data": {**self.config.dump()["data"], "processor": recorded}}
            ).data.processor
        except ConfigError as error:
            logger.warning("the LoRA's preprocessing can't be used, the pipeline's is: %s", error.problem)
            return None

    def _transformer(self, world: World) -> nn.Module:
        """As it is before training: float32 if all of it trains; on the host if it is about to be shared out."""
        full, sharded = self.config.train.method == "full", world.size > 1 and self.config.train.distributed == "fsdp"
        return load_transformer(
            self.family.transformer,
            self.config.model,
            torch.float32 if full else self.dtype,
            torch.device("cpu") if sharded else self.device,
        )

    def _encoder(self, *kinds: str) -> Encoder:
        """Text encoders, image encoder, or both."""
        parts = {"text": self.family.text_parts, "image": self.family.image_parts}
        wanted = [part for kind in kinds for part in parts[kind]]
        components = self.family.load(self.config.model.pretrained, wanted, self.dtype, self.device)
        return self.family.encoder(components, self.text_limit)

    def _provider(self, planned: PlannedSet) -> Provider:
        if self.config.cache.use_cache or not planned.from_images:
            return FromCache(self.store, planned.manifests)
        return FromImages(self._encoder("text", "image"), self.text_counter())

    def text_counter(self) -> TextCounter:
        """How long a prompt is, from the checkpoint's tokenizer."""
        parts = self.family.tokenizer_parts
        components = self.family.load(self.config.model.pretrained, parts, self.dtype, self.device)
        return self.family.text_counter(components, self.text_limit)


class FluxKontextLoraTrainer(Trainer):
    """`Trainer` for FLUX.1 Kontext."""

    family_name = "flux-kontext"


class QwenImageTrainer(Trainer):
    """`Trainer` for Qwen-Image."""

    family_name = "qwen-image"


class QwenImageEditTrainer(Trainer):
    """`Trainer` for Qwen-Image-Edit."""

    family_name = "qwen-image-edit"


class QwenImageEditPlusTrainer(Trainer):
    """`Trainer` for Qwen-Image-Edit-Plus."""

    family_name = "qwen-image-edit-plus"


def _preprocessing_of(record: Record) -> dict[str, Any]:
    """How a LoRA's images reached their size. Lists for controls of older files mean other controls than today's."""
    settings, lists = dict(record.preprocessing), ("controls_size", "controls_pixels")
    if record.controls_from == 0:
        return settings
    candidates = settings.get("multi_resolutions")
    dropped = [name for name in lists if settings.pop(name, None)]
    if isinstance(candidates, dict) and candidates.get("controls"):
        settings["multi_resolutions"] = {**candidates, "controls": []}
        dropped.append("multi_resolutions.controls")
    if dropped:
        logger.warning(
            "the LoRA's %s began with the second control when it was trained, and is not used: further controls are "
            "sized as the first; predict.preprocessing: config takes data.processor instead",
            " and ".join(dropped),
        )
    return settings


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        if name == "meta":
            raise RuntimeError("it holds no data")
        device = torch.empty(0, device=name).device
        if device.type == "cuda":  # events, collectives and FSDP go by the current device
            torch.cuda.set_device(device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.device: {name!r} can't be used: {str(error).splitlines()[0]}", "try auto or cpu."
        ) from None


def _estimated_length(prompt: str, sizes: Sequence[tuple[int, int]]) -> TextCount:
    """About four letters a token, and one token for 28 x 28 pixels."""
    tokens = len(prompt) // 4 + 1 + sum(height * width // 28**2 for height, width in sizes)
    return TextCount(tokens, tokens)
