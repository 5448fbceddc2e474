"""One run of training, read from top to bottom: rehearse, resume, step, validate, save.

The loop never waits for the device: metrics are read when they arrive (`step_metrics`), a step that is not finite is
skipped on the device (`optimizer.step`), batches are on their way before they are due (`batches`). It waits where it
must, before a checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from qflux.adapters.files import Record
from qflux.adapters.publish import write_card
from qflux.config import Config
from qflux.data.dataset import Dataset
from qflux.data.sample import names
from qflux.errors import CheckpointError, Interrupted, QfluxError
from qflux.losses.distribution import level_curves, visited_sizes
from qflux.losses.objective import Objective
from qflux.losses.timesteps import NoiseLevels
from qflux.models.facts import Facts
from qflux.report.page import write_report
from qflux.runs.folder import RunFolder
from qflux.runs.journal import HeldOut, Journal
from qflux.runs.ledger import Coverage
from qflux.runs.metrics import Listener, StepReport
from qflux.runs.paths import RunPaths
from qflux.training.batches import Batches, Step
from qflux.training.checkpoint import Checkpoints, TrainingState
from qflux.training.distributed import World
from qflux.training.edits import DrawnEdits
from qflux.training.model import TrainedModel
from qflux.training.passes import Passes
from qflux.training.preflight.rehearsal import Rehearsal
from qflux.training.signals import StopRequest
from qflux.training.step_metrics import Metrics, Reporter, StepMetrics
from qflux.training.validation import HeldOutLoss

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
class RunParts:
    """Everything a run has at hand; `fit` puts it together."""

    config: Config
    facts: Facts
    """Of the checkpoint."""
    world: World
    dataset: Dataset
    batches: Batches
    total: int
    """Optimizer steps of the run."""
    levels: NoiseLevels
    model: TrainedModel
    objective: Objective
    state: TrainingState
    checkpoints: Checkpoints
    metrics: Metrics
    reporter: Reporter
    held_out: HeldOutLoss | None
    edits: DrawnEdits | None
    stop: StopRequest
    listener: Listener | None


class Loop:
    """The steps of a run, and everything that happens between them."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._world = parts.world
        self._paths = RunPaths(parts.config.run_dir)
        self._update = parts.state.update
        self._metrics = parts.metrics
        self._passes = Passes(
            parts.config, parts.world, parts.batches, parts.model, parts.objective, parts.state.update, parts.metrics
        )
        self._journal: Journal | None = None
        self._padding: list[float] = []
        """The share of it in each step of the current epoch."""
        self._any_taken = False
        self._best: float | None = None
        self._consistent_after: int | None = None
        """Steps after which parameters and optimizer belong together; none while a step is being taken."""
        self._broken: StepMetrics | None = None
        """A step that must not be survived."""

    def run(self) -> FitResult:
        """Do every step that is not done yet."""
        parts = self._parts
        if self._config.train.preflight:
            self._rehearse()
        if self._world.any(parts.stop.requested):
            raise Interrupted("stopped before the first step")
        done = parts.checkpoints.resume(parts.state)
        best = self._world.first(parts.checkpoints.best)
        self._best = self._world.share(best[1] if best else None)
        self._journal = self._world.first(lambda: self._open_journal(done))
        try:
            found = self._first_look(done)
            with self._saving_what_is_done():
                found = self._steps(done) or found
            return self._finish(done, found)
        finally:
            self._close()

    def _open_journal(self, done: int) -> Journal:
        parts = self._parts
        levels = level_curves(parts.levels, visited_sizes(parts.dataset.training))
        return Journal(self._config, parts.dataset, levels, done, parts.listener)

    def _steps(self, done: int) -> HeldOut | None:
        """Do the steps; what the last validation found is returned."""
        parts, update, metrics, found = self._parts, self._update, self._metrics, None
        metrics.clock.lap()  # the rehearsal and the first validation are no part of the first step
        with closing(parts.batches.steps(done, parts.total)) as steps:
            for planned in steps:
                step = self._passes.run(planned)
                values = metrics.gather(step)

                # Decided on the device; a kill in here finds parameters and optimizer apart, so nothing is saved.
                self._consistent_after = None
                outcome = update.apply(step.number, values.loss)
                self._consistent_after = step.number + 1

                metrics.send(step, parts.total, update.learning_rate, values.packed(outcome))
                broken = self._handle_arrived()
                stopping = self._world.any(parts.stop.requested or broken is not None)
                if stopping or self._is_due(step):
                    found = self._settle(step, stopping) or found
                elif self._is_validated(step.number + 1):
                    found = self._look(step)
        return found

    def _is_due(self, step: Step) -> bool:
        """Whether a checkpoint follows a step."""
        done = step.number + 1
        return done == self._parts.total or done % self._config.train.checkpoint_every == 0

    def _is_validated(self, done: int) -> bool:
        """Whether held-out samples are looked at after so many steps."""
        every = self._config.validation.every or self._config.train.checkpoint_every
        return done == self._parts.total or done % every == 0

    def _look(self, step: Step) -> HeldOut | None:
        """Validate between two checkpoints."""
        broken = self._handle_arrived(wait=True)
        if broken is not None:
            self._stop_at(broken)
        found = self._validate(step.number + 1)
        self._metrics.clock.lap()  # validation is not part of the next step
        return found

    def _settle(self, step: Step, stopping: bool) -> HeldOut | None:
        """Wait for everything that is under way, save, and end the run if that was asked for."""
        done, total = step.number + 1, self._parts.total
        broken = self._handle_arrived(wait=True)
        if broken is not None:
            self._stop_at(broken)
        found = self._checkpoint(done, validate=self._is_validated(done) and (not stopping or done == total))
        self._metrics.clock.lap()  # validation is not part of the next step
        if stopping and done < total:
            raise Interrupted(f"stopped and saved after step {done} of {total}")
        return found

    def _handle_arrived(self, wait: bool = False) -> StepMetrics | None:
        """Report the steps whose metrics have arrived, up to one that must not be survived, if there is one."""
        for arrived in self._metrics.arrived(wait):
            step = arrived.step
            if self._broken is not None:
                break  # what came behind it is not reported
            if arrived.values.broken:
                if self._config.train.on_nan == "stop":
                    self._metrics.forget()
                    self._broken = arrived
                    break
                text = "step %d is skipped, its loss or gradient is NaN or infinite: %s"
                logger.warning(text, step.number + 1, names(arrived.broken_samples))
            report = self._parts.reporter.report(arrived)
            self._any_taken = self._any_taken or not report.skipped
            if self._journal:
                self._journal.step(report, step.samples)
            self._warn_of_padding(report)
        return self._broken

    def _warn_of_padding(self, report: StepReport) -> None:
        """Say after an epoch that too much padding was computed in it."""
        self._padding.append(report.padding_ratio)
        if report.step not in (self._parts.state.plan.first_step(report.epoch + 1), report.total_steps):
            return
        padding, self._padding = fmean(self._padding), []
        if padding > MOST_PADDING:
            logger.warning(
                "%.0f %% of what was computed in epoch %d is padding; train.execution: packed computes none",
                100 * padding,
                report.epoch + 1,
            )

    def _stop_at(self, broken: StepMetrics) -> None:
        """Parameters are as they were before the broken step: save them, and say what broke it."""
        step = broken.step.number
        folder = self._parts.checkpoints.save(step, self._parts.state)
        raise QfluxError(
            f"step {step + 1}: the loss or the gradient is NaN or infinite (gradient norm {broken.values.grad_norm}); "
            f"of {names(broken.broken_samples)}. Saved before that step: {folder}",
            "look at these samples, or set train.on_nan: skip; with another run_name, lower the learning rate or try "
            "model.dtype: float32.",
        )

    @contextmanager
    def _saving_what_is_done(self) -> Iterator[None]:
        """An error beside the arithmetic (a file, a disk, a tracker) costs no step that was taken."""
        try:
            yield
        except (Interrupted, CheckpointError):
            raise
        except Exception:
            # With several processes the others may be anywhere; what they have saved last is what there is.
            if self._world.size == 1 and self._consistent_after and self._broken is None:
                with suppress(Exception):
                    if self._handle_arrived(wait=True) is None:
                        self._parts.checkpoints.save(self._consistent_after, self._parts.state)
                        logger.warning("saved after step %d, before the error", self._consistent_after)
            raise

    def _first_look(self, done: int) -> HeldOut | None:
        """What the run starts from; or what a run that was told to stop at a checkpoint had no time for."""
        if done == 0:
            return self._validate(0)
        is_kept = done % self._config.train.checkpoint_every == 0 and self._is_validated(done)
        due = is_kept and self._parts.held_out is not None
        if due and self._world.share(self._parts.checkpoints.held_out(done)) is None:
            return self._checkpoint(done, validate=True)
        return None

    def _checkpoint(self, done: int, validate: bool) -> HeldOut | None:
        """Validate, and save. The best adapter is written first: a checkpoint says that all before it is done."""
        found = self._validate(done) if validate else None
        if found is not None and math.isfinite(found.loss) and (self._best is None or found.loss < self._best):
            self._best = found.loss
            if not self._parts.model.is_full:
                self._write(self._paths.best)
        self._parts.checkpoints.save(done, self._parts.state, found.loss if found else None)
        return found

    def _validate(self, done: int) -> HeldOut | None:
        """Held-out loss and edits, with the average's weights if there is one."""
        held_out, edits, model = self._parts.held_out, self._parts.edits, self._parts.model
        if held_out is None and edits is None:
            return None
        with self._averaged():
            found = held_out(model) if held_out else None
            drawn = edits(model) if edits else []
        if self._journal:
            self._journal.validation(done, found, drawn)
        return found

    def _averaged(self) -> AbstractContextManager[None]:
        """The running average in place of the parameters, if there is one."""
        return self._update.ema.in_place() if self._update.ema is not None else nullcontext()

    def _write(self, folder: Path) -> Path:
        with self._averaged():
            return self._parts.model.write(folder)

    def _finish(self, done: int, found: HeldOut | None) -> FitResult:
        parts = self._parts
        if done < parts.total and not self._any_taken:
            raise QfluxError(
                f"none of the {parts.total - done} steps was taken: every loss or gradient was NaN or infinite",
                "lower the learning rate or lora.alpha, or try model.dtype: bfloat16.",
            )
        result = self._write(self._paths.transformer if parts.model.is_full else self._paths.adapter)
        if not parts.model.is_full and self._journal:
            record, picture = Record.of(self._config), self._journal.newest_picture
            write_card(result.parent, record, parts.model.family, result.name, picture, parts.facts.pipeline)
        # Of all steps: the run may have begun in another process. Other nodes may not see the folder.
        written = self._world.first(lambda: RunFolder(self._paths.root))
        counted = self._world.share(asdict(written.coverage) if written else {})
        losses = self._world.share([written.losses[0], written.losses[-1]] if written and written.losses else None)
        return FitResult(
            result,
            parts.total,
            done,
            first_loss=losses[0] if losses else None,
            last_loss=losses[1] if losses else None,
            skipped_steps=parts.reporter.skipped,
            held_out_loss=found.loss if found else None,
            best=parts.checkpoints.best(),
            coverage=Coverage(**(counted | {"skipped": tuple(counted["skipped"])})),
        )

    def _rehearse(self) -> None:
        """Whatever could fail later is tried now."""
        parts = self._parts
        rehearsal = Rehearsal(self._config, parts.model, parts.state, self._world)
        self._world.first(rehearsal.require_disk)
        # Where a resumed run will go on, or just before; the last step if all are done.
        start = min(parts.checkpoints.newest_step(), parts.total - 1)
        while shortage := rehearsal.step(parts.batches.largest(start, parts.total), parts.objective, parts.checkpoints):
            self._passes.make_room(shortage, "before the first step")
        if parts.edits:
            rehearsal.edit(parts.edits)

    def _close(self) -> None:
        if self._journal is None:
            return
        self._journal.close()
        try:
            write_report([self._paths.root], self._paths.report)
        except Exception as error:  # a report must not cost a run
            logger.warning("the report can't be written: %s", error)
