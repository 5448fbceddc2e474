"""The passes of a step: forward and backward of each. If memory runs out, the step is done again in smaller ones."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.capacity.shortage import Shortage
from qflux.config import Config
from qflux.data.batch import Batch
from qflux.files.hashing import seed_of
from qflux.losses.objective import Objective
from qflux.training.batches import Batches, Step
from qflux.training.distributed import World
from qflux.training.model import TrainedModel
from qflux.training.optimizer.step import Update
from qflux.training.step_metrics import Metrics

logger = logging.getLogger(__name__)


def loss_of(batch: Batch, model: TrainedModel, objective: Objective) -> tuple[Tensor, Tensor]:
    """The share of a batch in the loss of its step, and the term of each sample; see `Objective`."""
    # Before the pass that has a gradient: whatever this one needs of memory is free again by then.
    base = model.base_velocity(batch) if objective.asks_base(batch) else None
    return objective(model.velocity(batch), batch, base)


@dataclass(frozen=True)
class Passes:
    """What takes a step up to its gradients."""

    config: Config
    world: World
    batches: Batches
    model: TrainedModel
    objective: Objective
    update: Update
    metrics: Metrics

    def run(self, step: Step) -> Step:
        """The gradients of a step. It comes back as it was cut in the end.

        Gradients that a pass has left behind when it failed are no use: the whole step is done again. The samples'
        noise is drawn from (seed, sample, visit), so it is the same step.
        """
        while True:
            # Adapter dropout draws from torch's generator: the same whatever came before this step.
            torch.manual_seed(seed_of("step", self.config.seed, step.number, self.world.rank))
            self.metrics.begin()
            shortage = self._try(step)
            if shortage is None:
                return step
            self.update.optimizer.zero_grad()
            self.make_room(shortage, f"step {step.number + 1}")
            step = self.batches.again(step)

    def _try(self, step: Step) -> Shortage | None:
        """Do all passes, or say which one there was not enough memory for; what it had made is gone then."""
        batches = self.metrics.clock.waits(step)
        for visits in step.planned.ranks[self.world.rank]:
            try:
                batch = next(batches)
                loss, terms = loss_of(batch, self.model, self.objective)
                self.update.backward(loss)
            except torch.OutOfMemoryError as error:
                return self.batches.shortage(visits, error)
            self.metrics.add(batch, terms)
        return None

    def make_room(self, shortage: Shortage, where: str) -> None:
        """Let what follows take less memory; an error if there is nothing left to give up."""
        if self.world.size > 1 and self.config.train.distributed == "fsdp":
            raise shortage.error(self.config)  # the other ranks wait inside this very pass
        self.model.let_go()
        if len(shortage.lengths) > 1:
            self.batches.most_tokens = max(*shortage.lengths, shortage.tokens // 2)
            remedy = f"from here on a pass has at most {self.batches.most_tokens:,} tokens"
        elif self.model.take_less_memory():
            remedy = "from here on every block is recomputed as a whole"
        else:
            raise shortage.error(self.config)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        logger.warning("%s: %s; %s. The result stays the same", where, shortage.problem, remedy)
