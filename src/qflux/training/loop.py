"""One run of training, read from top to bottom: prepare, check, loop, validate, save.

The loop never waits for the device: losses and norms are read when they arrive (`readback`), a step that is no number
is left out on the device (`update`), batches are on their way before they are due (`feed`). It waits where it must,
before a checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from qflux.config import Config
from qflux.data.plan import PlannedStep, TrainingPlan
from qflux.errors import CheckpointError, Interrupted, QfluxError
from qflux.files.hashing import seed_of
from qflux.files.jsonl import read_lines
from qflux.losses.objective import Objective, StepSize
from qflux.losses.timesteps import NoiseLevels
from qflux.models.family import Encoder
from qflux.runs.journal import Journal
from qflux.runs.ledger import Coverage, coverage
from qflux.runs.metrics import Listener, StepReport
from qflux.training.batches import Assignment, Feed, Provider, assignments
from qflux.training.checkpoint import Checkpoints, TrainingState
from qflux.training.distributed import World
from qflux.training.encode import PlannedSet
from qflux.training.flops import StepFlops, peak_of
from qflux.training.model import TrainedModel
from qflux.training.optimizer.build import build_optimizer, build_schedule
from qflux.training.optimizer.step import Ema, LossScale, Update
from qflux.training.preflight.rehearsal import naming_memory, rehearse, require_disk, try_edit
from qflux.training.signals import StopRequest
from qflux.training.step_metrics import (
    Readback,
    Reporter,
    StepClock,
    StepFigures,
    StepNote,
    broken_samples,
    is_broken,
    packed,
)
from qflux.training.validation import DrawnEdits, HeldOutLoss, PreparedEdit, Validation

logger = logging.getLogger(__name__)

MOST_PADDING = 0.3
"""A larger share of padding in an epoch is worth a warning."""


@dataclass(frozen=True)
class FitResult:
    """How a run ended."""

    adapter: Path
    """The file of the adapter; after a full fine-tuning the folder of the transformer."""
    steps: int
    resumed_from: int
    first_loss: float | None
    last_loss: float | None
    skipped_steps: int
    held_out_loss: float | None
    """At the end of the run."""
    best: tuple[Path, float] | None
    """The checkpoint with the lowest held-out loss, and that loss."""
    coverage: Coverage


@dataclass(frozen=True)
class _Broken:
    """A step whose loss or gradient is no number."""

    number: int
    step: PlannedStep
    values: list[float]


class Run:
    """Everything a run has at hand."""

    def __init__(
        self,
        config: Config,
        world: World,
        planned: PlannedSet,
        provider: Provider,
        plan: TrainingPlan,
        total: int,
        model: TrainedModel,
        checkpoints: Checkpoints,
        levels: NoiseLevels,
        decoder: Callable[[], tuple[Encoder, Any]],
        device: torch.device,
        stop: StopRequest,
        listener: Listener | None,
        own: Sequence[PreparedEdit] = (),
    ) -> None:
        self._config = config
        self._world = world
        self._planned = planned
        self._samples = planned.training
        self._plan = plan
        self._total = total
        self._model = model
        self._checkpoints = checkpoints
        self._device = device
        self._stop = stop
        self._listener = listener
        self._objective = Objective(config.loss)
        channels, dtype = model.family.image_channels, getattr(torch, config.model.dtype)
        self._feed = Feed(config, self._samples, provider, levels, channels, device, dtype)
        self._update = self._build_update()
        self._state = TrainingState(self._update, plan)
        self._largest, self._largest_visits = plan.largest(min(checkpoints.newest_step(), total - 1), total)
        self._held_out = HeldOutLoss(config, planned.held_out, provider, levels, world, device)
        self._edits: DrawnEdits | None = None
        if own or (planned.held_out and config.validation.images):
            self._edits = DrawnEdits(config, planned.held_out, provider, *decoder(), device, own)
        self._readback: Readback[StepNote] = Readback()
        self._reporter = Reporter(
            StepFlops(model.transformer, len(model.family.blocks(model.transformer)), model.is_full),
            (peak_of(device) or 0.0) * world.size or None,
            padded=config.train.execution == "padded",
        )
        checkpoints.measure = self._held_out.measure
        self._journal: Journal | None = None
        self._reports: list[StepReport] = []
        self._best: float | None = None
        self._whole_steps: int | None = None
        """Steps after which parameters and optimizer belong together; nothing while a step is being taken."""
        self._is_broken = False

    def __call__(self) -> FitResult:
        """Do every step of the plan that is not done yet."""
        config = self._config
        if config.train.preflight:
            self._preflight()
        if self._world.any(self._stop.requested):
            raise Interrupted("stopped before the first step")
        done = self._checkpoints.resume(self._state)
        best = self._world.first(self._checkpoints.best)
        self._best = self._world.share(best[1] if best else None)
        self._journal = self._world.first(lambda: Journal(config, self._planned, done, self._listener))
        try:
            found = self._first_look(done)
            with self._saving_what_is_done():
                found = self._loop(done) or found
            return self._finish(done, found)
        finally:
            if self._journal:
                self._journal.close()

    def _first_look(self, done: int) -> Validation | None:
        """What the run starts from; or what a run that was told to stop at a checkpoint had no time for."""
        if done == 0:
            return self._validate(0)
        due = done % self._config.train.checkpoint_every == 0 and bool(self._held_out)
        if due and self._world.share(self._checkpoints.held_out(done)) is None:
            return self._checkpoint(done, validate=True)
        return None

    def _loop(self, done: int) -> Validation | None:
        """The steps. What the last validation found is returned."""
        config, update, world = self._config, self._update, self._world
        found, clock = None, StepClock()
        with closing(self._feed(self._assigned(done))) as batches:
            for number, step in self._plan.steps(done, self._total):
                torch.manual_seed(seed_of("step", config.seed, number, world.rank))  # dropout draws from it
                figures = StepFigures(step, world, self._device)
                for assigned in assignments(step, world.rank, self._samples):
                    with clock.waits():
                        batch = next(batches)
                    with naming_memory([self._samples[visit.sample] for visit in assigned.visits], batch, config):
                        loss, terms = self._objective(self._model.velocity(batch), batch)
                        update.backward(loss)
                    if not assigned.is_stand_in:
                        figures.add(terms, batch)
                gathered = figures.gathered()
                self._whole_steps = None
                taken = update.apply(number, (gathered[0] * gathered[2]).sum())
                self._whole_steps = number + 1
                self._readback.push(self._note(number, step, figures, clock), packed(taken, gathered))

                broken = self._report()
                last = number + 1 == self._total
                stopping = world.any(self._stop.requested or broken is not None)
                if stopping or last or (number + 1) % config.train.checkpoint_every == 0:
                    broken = self._report(wait=True)
                    if broken is not None:
                        self._stop_at(broken)
                    found = self._checkpoint(number + 1, validate=not stopping or last)
                    clock.lap()
                if stopping and not last:
                    raise Interrupted(f"stopped and saved after step {number + 1} of {self._total}")
        return found

    @contextmanager
    def _saving_what_is_done(self) -> Iterator[None]:
        """An error beside the arithmetic (a file, a disk, a tracker) costs no step that was taken."""
        try:
            yield
        except (Interrupted, CheckpointError):
            raise
        except Exception:
            # With several processes the others may be anywhere; what they have saved last is what there is.
            if self._world.size == 1 and self._whole_steps and not self._is_broken:
                with suppress(Exception):
                    if self._report(wait=True) is None:
                        self._checkpoints.save(self._whole_steps, self._state)
                        logger.warning("saved after step %d, before the error", self._whole_steps)
            raise

    def _assigned(self, done: int) -> Iterator[Assignment]:
        for _, step in self._plan.steps(done, self._total):
            yield from assignments(step, self._world.rank, self._samples)

    def _note(self, number: int, step: PlannedStep, figures: StepFigures, clock: StepClock) -> StepNote:
        memory = torch.cuda.max_memory_allocated(self._device) / 2**30 if self._device.type == "cuda" else None
        rate = float(self._update.optimizer.param_groups[0]["lr"])
        return StepNote(number, self._total, step, rate, figures.lengths(), *clock.lap(), memory)

    def _report(self, wait: bool = False) -> _Broken | None:
        """Report the steps whose figures have arrived, up to one that must not be survived, if there is one."""
        for note, values in self._readback.arrived(wait):
            if is_broken(values):
                if self._config.train.on_nan == "stop":
                    self._readback.clear()
                    self._readback.push(note, torch.tensor(values, dtype=torch.float64))
                    return _Broken(note.number, note.step, values)
                names = ", ".join(self._names(broken_samples(note.step, values)))
                logger.warning("step %d is left out, its loss or gradient is no number: %s", note.number + 1, names)
            report = self._reporter.report(note, values)
            self._reports.append(report)
            if self._journal:
                self._journal.step(report, note.step)
            self._warn_of_padding(report)
        return None

    def _warn_of_padding(self, report: StepReport) -> None:
        """A word for every epoch in which too much padding was computed, when its last step is reported."""
        if report.step not in (self._plan.first_step(report.epoch + 1), report.total_steps):
            return
        padding = fmean(other.padding_ratio for other in self._reports if other.epoch == report.epoch)
        if padding > MOST_PADDING:
            logger.warning(
                "%.0f %% of what was computed in epoch %d is padding; train.execution: packed computes none",
                100 * padding,
                report.epoch + 1,
            )

    def _stop_at(self, broken: _Broken) -> None:
        """Parameters are as they were before the broken step: save them, and say what broke it."""
        self._is_broken = True
        folder = self._checkpoints.save(broken.number, self._state)
        names = ", ".join(self._names(broken_samples(broken.step, broken.values)))
        raise QfluxError(
            f"step {broken.number + 1}: the loss or the gradient is no number (gradient norm {broken.values[0]}); "
            f"of {names}. Saved before that step: {folder}",
            "look at these samples, or set train.on_nan: skip; with another run_name, lower the learning rate or try "
            "model.dtype: float32.",
        )

    def _names(self, samples: list[int]) -> list[str]:
        return [self._samples[sample].example.name for sample in samples]

    def _checkpoint(self, done: int, validate: bool) -> Validation | None:
        """Validate, and save. The best adapter is written first: a checkpoint says that all before it is done."""
        found = self._validate(done) if validate else None
        if found is not None and math.isfinite(found.loss) and (self._best is None or found.loss < self._best):
            self._best = found.loss
            if not self._model.is_full:
                self._write(self._config.run_dir / "best")
        self._checkpoints.save(done, self._state, found.loss if found else None)
        return found

    def _validate(self, done: int) -> Validation | None:
        """Held-out loss and edits, with the average's weights if there is one."""
        if not self._held_out and not self._edits:
            return None
        with self._averaged():
            found = self._held_out(self._model) if self._held_out else None
            edits = self._edits(self._model) if self._edits else []
        if self._journal:
            self._journal.validation(done, found, edits)
        return found

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The running average in place of the parameters, if there is one."""
        ema = self._update.ema
        if ema is not None:
            ema.swap()
        try:
            yield
        finally:
            if ema is not None:
                ema.swap()

    def _write(self, folder: Path) -> Path:
        with self._averaged():
            return self._model.write(folder)

    def _finish(self, done: int, found: Validation | None) -> FitResult:
        folder = self._config.run_dir
        if self._reports and all(report.skipped for report in self._reports):
            raise QfluxError(
                f"none of the {len(self._reports)} steps was taken: every loss or gradient was no number",
                "lower the learning rate or lora.alpha, or try model.dtype: bfloat16.",
            )
        result = self._write(folder / ("transformer" if self._model.is_full else "adapter"))
        if not self._model.is_full and self._journal:
            self._journal.card(result)
        # Of the whole run, which may have begun in another process.
        lines = read_lines(folder / "metrics.jsonl")
        losses = [float(line["loss"]) for line in lines if isinstance(line.get("loss"), int | float)]
        return FitResult(
            result,
            self._total,
            done,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            skipped_steps=self._reporter.skipped,
            held_out_loss=found.loss if found else None,
            best=self._checkpoints.best(),
            coverage=coverage(folder / "ledger.jsonl"),
        )

    def _preflight(self) -> None:
        """Whatever could fail later is tried now."""
        self._world.first(lambda: require_disk(self._config, self._state))
        size = StepSize(self._largest, len(self._largest_visits))
        with closing(self._feed([Assignment(self._largest_visits, size, drops_nothing=True)])) as batches:
            members = [self._samples[visit.sample] for visit in self._largest_visits]
            rehearse(
                next(batches),
                members,
                self._model,
                self._objective,
                self._state,
                self._checkpoints,
                self._world,
                self._config,
            )
        if self._edits:
            try_edit(self._edits, self._model)

    def _build_update(self) -> Update:
        config, parameters = self._config, self._model.parameters
        optimizer = build_optimizer(config.optimizer, list(parameters.values()))
        return Update(
            parameters,
            optimizer,
            build_schedule(config.train, optimizer, self._total),
            self._world,
            max_norm=config.train.max_grad_norm,
            stop_when_broken=config.train.on_nan == "stop",
            ema=Ema(config.train.ema, parameters) if config.train.ema else None,
            loss_scale=LossScale(self._device) if config.model.dtype == "float16" else None,
        )
