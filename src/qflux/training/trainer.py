"""Training, read from top to bottom: START HERE.

    qflux cache   `Trainer.cache`    samples on disk become embeddings on disk
    qflux fit     `Trainer.fit`      embeddings become a LoRA
    qflux predict `Trainer.predict`  an image and a prompt become an edited image

A batch holds samples of any sizes. Its tokens are concatenated, not padded; see `qflux.ragged.layout` for how
attention, modulation and positions keep the samples apart.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from qflux.adapters.files import load_adapter, save_adapter
from qflux.adapters.lora import inject, trainable
from qflux.config import Config
from qflux.data.batch import EditBatch
from qflux.data.cache import EmbeddingCacheManager
from qflux.data.claims import Claims
from qflux.data.inspect import Inspected, inspect
from qflux.data.samples import SizedExample
from qflux.data.store import key_of, seed_of, write_bytes
from qflux.errors import CheckpointError, ConfigError, DataError, Interrupted, QfluxError, collected
from qflux.losses.objective import Objective
from qflux.models import Family, get_family
from qflux.models.family import Encoder, ModelInputs, TextCount, TextCounter, text_limit
from qflux.ragged.compilation import compile_blocks
from qflux.ragged.layout import image_tokens, padding_ratio
from qflux.sampling.predict import Edit, Predictor
from qflux.training.checkpoint import Checkpoints, TrainingState
from qflux.training.encode import (
    PlannedSet,
    TrainingSample,
    circumstances,
    encoders_name,
    is_refused,
    plan_samples,
    require_complete,
    require_fitting,
)
from qflux.training.feed import Feed, FromCache, FromImages, Provider, training_plan
from qflux.training.fill import CacheFiller, CacheReport
from qflux.training.fill import Listener as CacheListener
from qflux.training.interrupt import StopRequest, deferred_signals, exclusive
from qflux.training.ledger import Coverage, Ledger, coverage
from qflux.training.metrics import Listener, MetricsFile, StepReport
from qflux.training.optim import build_optimizer, build_schedule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitResult:
    """How a run ended."""

    adapter: Path
    steps: int
    resumed_from: int
    first_loss: float | None
    last_loss: float | None
    coverage: Coverage


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

        inspected = inspect(self.config, self.family, self.store.index, length, self.text_limit.tokens, progress)
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

    def fit(self, listener: Listener | None = None) -> FitResult:
        """Train a LoRA on the samples, going on from the newest checkpoint if there is one."""
        config = self.config
        planned = self.samples()
        provider = self._provider(planned)
        plan = training_plan(config, planned.training, provider)
        checkpoints = Checkpoints(config.run_dir / "checkpoints", config.train.keep_checkpoints)
        identity = _data_identity(config, planned.training)
        plan.starts = checkpoints.epoch_starts(identity) or plan.starts
        total = plan.total_steps(config.train.max_train_steps, config.train.num_epochs)
        if total == 0:
            raise ConfigError("no sample is due in the epochs to train", "raise train.num_epochs or the weights.")
        logger.info("%d samples, %d steps", len(planned.training), total)

        transformer = self._transformer()
        require_fitting(planned, transformer)
        inject(transformer, config.lora, config.seed)
        self._prepare(transformer)
        parameters = trainable(transformer)
        optimizer = build_optimizer(config.optimizer, parameters.values())
        state = TrainingState(parameters, optimizer, build_schedule(config.train, optimizer, total), plan)
        checkpoints.settings = _path_settings(config, total) | identity

        with exclusive(config.run_dir), deferred_signals() as stop:
            return self._train(planned, provider, total, transformer, state, checkpoints, stop, listener)

    def _train(
        self,
        planned: PlannedSet,
        provider: Provider,
        total: int,
        transformer: nn.Module,
        state: TrainingState,
        checkpoints: Checkpoints,
        stop: StopRequest,
        listener: Listener | None,
    ) -> FitResult:
        """The loop: every step of the plan that is not done yet."""
        config, parameters, optimizer, samples = self.config, state.parameters, state.optimizer, planned.training
        objective = Objective(config.loss)
        done = checkpoints.resume(state)
        if done > total:
            raise CheckpointError(
                f"{config.run_dir} has already trained {done} steps, more than the {total} asked for",
                "raise train.max_train_steps, or choose another run_name.",
            )
        write_bytes(config.run_dir / "config.yaml", yaml.safe_dump(config.dump(), sort_keys=False).encode())
        metrics = MetricsFile(config.run_dir / "metrics.jsonl", done)
        ledger = Ledger(config.run_dir / "ledger.jsonl", samples, planned.faults, done)
        feed = Feed(config, samples, provider, self.family.image_channels, self.device, self.dtype)
        micro_batches = (batch for _, step in state.plan.steps(done, total) for batch in step.ranks[0])
        losses: list[float] = []

        with closing(feed(micro_batches)) as batches:
            for number, step in state.plan.steps(done, total):
                started = time.perf_counter()
                torch.manual_seed(seed_of("step", config.seed, number))  # dropout is all that draws from it
                target_tokens = sum(image_tokens(samples[visit.sample].img_shapes[:1]) for visit in step.visits)
                loss, lengths = torch.zeros((), device=self.device), []
                for _ in step.ranks[0]:
                    batch = next(batches)
                    lengths.append(batch.lengths)
                    share = objective(self._velocity(transformer, batch), batch, target_tokens, step.samples)
                    share.backward()
                    loss += share.detach()
                grad_norm = nn.utils.clip_grad_norm_(parameters.values(), config.train.max_grad_norm or float("inf"))
                _require_finite(loss, grad_norm, number, [samples[visit.sample] for visit in step.visits])
                learning_rate = state.schedule.get_last_lr()[0]
                optimizer.step()
                state.schedule.step()
                optimizer.zero_grad()

                report = StepReport(
                    step=number + 1,
                    total_steps=total,
                    epoch=step.epoch,
                    loss=loss.item(),
                    grad_norm=grad_norm.item(),
                    learning_rate=float(learning_rate),
                    samples=step.samples,
                    tokens=sum(map(sum, lengths)),
                    padding_avoided=padding_ratio(*lengths),
                    seconds=time.perf_counter() - started,
                )
                losses.append(report.loss)
                metrics(report)
                ledger.record(report.step, step)
                if listener:
                    listener(report)
                if report.step % config.train.checkpoint_every == 0 or report.step == total or stop.requested:
                    checkpoints.save(report.step, state)
                if stop.requested and report.step < total:
                    raise Interrupted(f"stopped and saved after step {report.step} of {total}")

        adapter = save_adapter(transformer, config.run_dir / "adapter")
        return FitResult(
            adapter,
            total,
            done,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            coverage=coverage(config.run_dir / "ledger.jsonl"),
        )

    def predict(
        self,
        images: Sequence[Sequence[Image.Image]],
        prompts: Sequence[str],
        *,
        lora: Path | None = None,
        lora_scale: float = 1.0,
        size: tuple[int, int] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Image.Image]:
        """Edit images: per prompt its control images (the first one is the image to edit), of any sizes.

        `size` is `(height, width)` of the results; by default that of the first control after preprocessing. `seeds`
        has one entry per prompt; the default is `predict.seed` for each.
        """
        settings = self.config.predict
        seeds = seeds if seeds is not None else [settings.seed] * len(prompts)
        if not len(images) == len(prompts) == len(seeds):
            raise ValueError(
                f"{len(images)} image lists, {len(prompts)} prompts and {len(seeds)} seeds: one of each per edit"
            )
        edits = [
            Edit(tuple(controls), prompt, negative_prompt=settings.negative_prompt, seed=seed, size=size)
            for controls, prompt, seed in zip(images, prompts, seeds, strict=True)
        ]
        return self.predictor(lora, lora_scale)(edits)

    def predictor(self, lora: Path | None = None, lora_scale: float = 1.0) -> Predictor:
        """Everything loaded for predictions, with or without a LoRA."""
        parts = ("transformer", "scheduler", *self.family.text_parts, *self.family.image_parts)
        components = self.family.load(self.config.model.pretrained, parts, self.dtype, self.device)
        if lora is not None:
            load_adapter(components.transformer, lora, lora_scale)
        return Predictor(self.family, components, self.config)

    def _transformer(self) -> nn.Module:
        parts = ("transformer",)
        return self.family.load(self.config.model.pretrained, parts, self.dtype, self.device).transformer

    def _prepare(self, transformer: nn.Module) -> None:
        transformer.train()
        if self.config.train.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        if self.config.train.compile:
            compile_blocks(self.family.blocks(transformer))

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

    def _velocity(self, transformer: nn.Module, batch: EditBatch) -> Tensor:
        """The model's velocity `(M, C)` for the target tokens of a batch."""
        inputs = ModelInputs(
            images=batch.noisy_images(),
            img_shapes=batch.img_shapes,
            text=batch.text,
            sigma=batch.sigma,
            guidance=self.config.train.guidance,
            padded=self.config.train.execution == "padded",
        )
        prediction, _ = batch.images.split(self.family.velocity(transformer, inputs))
        return prediction


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


def _device(name: str) -> torch.device:
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        if name == "meta":
            raise RuntimeError("it holds no data")
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model.device: {name!r} can't be used: {str(error).splitlines()[0]}", "try auto or cpu."
        ) from None


def _estimated_length(prompt: str, sizes: Sequence[tuple[int, int]]) -> TextCount:
    """About four letters a token, and one token for 28 x 28 pixels."""
    tokens = len(prompt) // 4 + 1 + sum(height * width // 28**2 for height, width in sizes)
    return TextCount(tokens, tokens)


def _require_finite(loss: Tensor, grad_norm: Tensor, number: int, samples: Sequence[TrainingSample]) -> None:
    if math.isfinite(loss.item()) and math.isfinite(grad_norm.item()):
        return
    names = [sample.example.name for sample in samples]
    raise QfluxError(
        f"step {number + 1}: the loss is {loss.item()}, the gradient norm {grad_norm.item()}; "
        f"the samples were {', '.join(names)}",
        "lower the learning rate, look at these samples, or try model.dtype: float32. The last checkpoint is intact.",
    )


_PATH_KEYS = (
    "max_grad_norm",
    "lr_scheduler",
    "lr_warmup_steps",
    "guidance",
    "caption_dropout",
    "control_dropout",
)


def _path_settings(config: Config, total: int) -> dict[str, object]:
    """What decides where training goes, besides the data; a resumed run must share it with its checkpoint."""
    values = config.dump()
    sections = {name: values[name] for name in ("family", "lora", "optimizer", "loss")}
    for key in ("pretrained", "dtype", "max_sequence_length"):
        sections[f"model.{key}"] = values["model"][key]
    sections["data.processor"] = values["data"]["processor"]
    for key in _PATH_KEYS:
        sections[f"train.{key}"] = values["train"][key]
    if config.train.lr_scheduler in ("linear", "cosine"):
        sections["train.max_train_steps"] = total
    return sections


def _data_identity(config: Config, samples: Sequence[TrainingSample]) -> dict[str, object]:
    """What decides the plan: the samples, how often each trains, and how they are batched."""
    content = sorted((sample.address, sample.example.rate, sample.example.is_prior) for sample in samples)
    return {
        "seed": config.seed,
        "data.batch_size": config.data.batch_size,
        "data.max_tokens": config.data.max_tokens,
        "train.gradient_accumulation_steps": config.train.gradient_accumulation_steps,
        "data (samples)": key_of(content)[:16],
    }
