"""How a run is put together: every part of it, in the order in which something can be wrong with it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from qflux.cache.samples import require_fitting
from qflux.capacity.flops import StepFlops, peak_of
from qflux.config import Config
from qflux.data.dataset import Dataset
from qflux.data.plan import TrainingPlan
from qflux.errors import ConfigError
from qflux.files.locks import exclusive
from qflux.losses.objective import Objective
from qflux.losses.timesteps import NoiseLevels
from qflux.models.pretrained import Pretrained
from qflux.runs.metrics import Listener
from qflux.runs.paths import RunPaths
from qflux.training.batches import Batches, SampleReader, training_plan
from qflux.training.checkpoint import Checkpoints, TrainingState, adopt, read_past
from qflux.training.distributed import World
from qflux.training.edits import DrawnEdits, PreparedEdit, prepare_own_edits
from qflux.training.loop import FitResult, Loop, RunParts
from qflux.training.model import TrainedModel, load_to_train
from qflux.training.optimizer.build import build_optimizer
from qflux.training.optimizer.ema import Ema
from qflux.training.optimizer.loss_scale import LossScale
from qflux.training.optimizer.schedule import build_schedule
from qflux.training.optimizer.step import Update, settle_gradients
from qflux.training.preflight.fitting import fitted_to_run
from qflux.training.preflight.probes import settings_probes, starts_from, trained_weights
from qflux.training.resume_guard import (
    DATA,
    STEPS,
    data_identity,
    known_starts,
    noise_levels,
    path_settings,
    require_same_data,
    warn_of_length,
)
from qflux.training.signals import deferred_signals, repeatable
from qflux.training.step_metrics import Metrics, Reporter
from qflux.training.validation import HeldOutLoss

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Course:
    """Where a run goes, known before anything large is loaded."""

    plan: TrainingPlan
    total: int
    """Optimizer steps."""
    reader: SampleReader
    levels: NoiseLevels
    held_out: HeldOutLoss
    checkpoints: Checkpoints
    start: Path | None
    """An adapter whose weights the one to train begins with."""


def fit(
    config: Config,
    pretrained: Pretrained,
    dataset: Dataset,
    listener: Listener | None = None,
    accept_data_change: bool = False,
) -> FitResult:
    """Train on samples whose prompts have been counted, going on from the newest checkpoint if there is one.

    If its samples are not these, that is an error, unless `accept_data_change` says that it should go on with them.
    """
    world, family, device = World.join(), pretrained.family, pretrained.device
    course = chart(config, pretrained, dataset, world, accept_data_change)
    own = prepare_own_edits(config, pretrained)
    logger.info("%d samples, %d steps, %d processes", len(dataset.training), course.total, world.size)
    with ExitStack() as held:
        world.first(lambda: held.enter_context(exclusive(config.run_dir)))
        held.enter_context(repeatable(config.train.deterministic))
        choice = fitted_to_run(config, family, device, course.plan, world)
        transformer = load_to_train(config, pretrained, world, choice)
        model = TrainedModel(transformer, family, config, world, device, choice, course.start)
        require_fitting(dataset, family.widths(transformer), config)
        stop = held.enter_context(deferred_signals())  # until here stopping is at once: there is nothing to save
        channels = family.widths(transformer).image
        objective = Objective(config.loss, always_asks=world.size > 1 and config.train.distributed == "fsdp")
        parts = RunParts(
            config=config,
            facts=pretrained.facts,
            world=world,
            dataset=dataset,
            batches=Batches(
                config, course.plan, dataset.training, course.reader, course.levels, channels, world, device
            ).cut_to(choice.most_tokens),
            total=course.total,
            levels=course.levels,
            model=model,
            objective=objective,
            state=TrainingState(build_update(config, model, world, device, course.total), course.plan),
            checkpoints=course.checkpoints,
            metrics=Metrics(world, device, config.train.noises_per_sample, family.pairs),
            reporter=_reporter(config, model, objective.looks, world, device),
            held_out=course.held_out or None,
            edits=_edits(config, pretrained, dataset, course.reader, own),
            stop=stop,
            listener=listener,
        )
        return Loop(parts).run()


def chart(config: Config, pretrained: Pretrained, dataset: Dataset, world: World, accept_data_change: bool) -> Course:
    """Plan a run, and find out whether it may go on from the one so far; no weight is loaded for it."""
    family, facts, paths = pretrained.family, pretrained.facts, RunPaths(config.run_dir)
    if facts.caution:
        logger.warning("%s: %s", *facts.caution)
    if config.train.resume_from is not None:
        source = config.train.resume_from
        world.first(lambda: adopt(source, paths.checkpoints))
    plan = training_plan(config, facts, dataset.training, world.size)
    identity = data_identity(config, dataset.training, world.size)
    past = read_past(paths.checkpoints, world)
    plan.starts = known_starts(past, identity) or plan.starts
    total = plan.total_steps(config.train.max_train_steps, config.train.num_epochs)
    if total == 0:
        raise ConfigError("no sample is due in the epochs to train", "raise train.num_epochs or the weights.")

    levels, schedule = NoiseLevels(config.loss.timesteps), dict[str, object]()
    if config.loss.timesteps.shift == "resolution":
        shift = family.noise_shift(pretrained.scheduler())
        levels, schedule = noise_levels(config, shift, facts.num_inference_steps, past)
    reader = sample_reader(config, pretrained, dataset)
    held_out = HeldOutLoss(config, dataset.held_out, reader, levels, world, pretrained.device)
    checkpoints = Checkpoints(
        paths.checkpoints,
        config.train.keep_checkpoints,
        path_settings(config, total) | identity | schedule,
        world,
        may_differ={STEPS, DATA},
        measure=held_out.measure,
    )
    world.first(lambda: checkpoints.require_usable(total))
    require_same_data(past, identity, paths.ledger, dataset.training, accept_data_change)
    warn_of_length(past, config.train, total)

    for _, probe in settings_probes(config, family, total, goes_on=past is not None):
        probe()
    trained_weights(config, family)
    if config.lora.init_from and past is not None:
        logger.info("lora.init_from was the start of this run, which goes on from its checkpoint")
    start = starts_from(config) if past is None else None
    return Course(plan, total, reader, levels, held_out, checkpoints, start)


def sample_reader(config: Config, pretrained: Pretrained, dataset: Dataset) -> SampleReader:
    """Reads embeddings from the cache; or encodes images when they are due, if the cache is not used."""
    from_cache = config.cache.use_cache or not dataset.from_images
    return SampleReader(None if from_cache else pretrained.encoder("text", "image"))


def build_update(config: Config, model: TrainedModel, world: World, device: torch.device, total: int) -> Update:
    """The optimizer of a model, with everything that a step needs."""
    optimizer = build_optimizer(config.optimizer, model.parameters, config.lora.plus_ratio)
    if not model.is_full and config.train.distributed == "ddp":
        settle_gradients(model.parameters.values())
    return Update(
        model.parameters,
        optimizer,
        build_schedule(config.train, optimizer, total),
        world,
        max_norm=config.train.max_grad_norm,
        stop_when_broken=config.train.on_nan == "stop",
        ema=Ema(config.train.ema, model.parameters) if config.train.ema else None,
        loss_scale=LossScale(device) if config.model.dtype == "float16" else None,
    )


def _reporter(config: Config, model: TrainedModel, looks: int, world: World, device: torch.device) -> Reporter:
    flops = StepFlops(model.family.arithmetic(model.transformer), model.is_full, looks)
    peak = (peak_of(device) or 0.0) * world.size or None
    return Reporter(flops, peak, padded=config.train.execution == "padded")


def _edits(
    config: Config, pretrained: Pretrained, dataset: Dataset, reader: SampleReader, own: list[PreparedEdit]
) -> DrawnEdits | None:
    """What is drawn at every checkpoint, if anything is."""
    if not own and not (dataset.held_out and config.validation.images):
        return None
    encoder, scheduler = pretrained.encoder("image"), pretrained.scheduler()
    return DrawnEdits(config, pretrained.facts, dataset.held_out, reader, encoder, scheduler, pretrained.device, own)
