"""The transformer as it trains: what of it trains, in what precision, how its blocks run, on how many processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qflux.adapters.attach import start_from
from qflux.adapters.export import save_verified
from qflux.adapters.file_names import FILE_NAME
from qflux.adapters.files import Record, names_of, read_adapter, write_product
from qflux.adapters.lora import ADAPTER, adapter_tensors, inject, trainable, trained_layers, without_adapter
from qflux.adapters.merge import write_transformer
from qflux.capacity.choice import Choice
from qflux.config import Config
from qflux.data.batch import Batch
from qflux.memory.recomputation import recompute
from qflux.memory.streaming import StreamedBlocks
from qflux.models import Family
from qflux.models.family import ModelInputs
from qflux.models.precision import compute_in_eight_bits, dtype_of
from qflux.models.pretrained import Pretrained
from qflux.ragged.compilation import compile_blocks
from qflux.training.distributed import World, full_tensor

logger = logging.getLogger(__name__)


def load_to_train(config: Config, pretrained: Pretrained, world: World, choice: Choice) -> nn.Module:
    """The transformer before training: float32 if all of it trains; on the host if not all of it goes to the device."""
    stays = choice.streamed > 0 or config.model.precision or (world.size > 1 and config.train.distributed == "fsdp")
    transformer: nn.Module = pretrained.transformer(
        torch.float32 if config.train.method == "full" else None, torch.device("cpu") if stays else None
    )
    return transformer


class TrainedModel:
    """A transformer made ready: `velocity` of a batch, `parameters` that train, and how the result is written."""

    def __init__(
        self,
        transformer: nn.Module,
        family: Family,
        config: Config,
        world: World,
        device: torch.device,
        choice: Choice,
        start: Path | None = None,
    ) -> None:
        """`choice` says how blocks run, `start` is an adapter whose weights the one to train begins with."""
        self.transformer: Any = transformer
        self.family = family
        self._config = config
        self._world = world
        self._device = device
        self._choice = choice
        self._keeps_attention = choice.keeps_attention
        """What the run began with: whichever way one sample is computed, it stays that way to the last bit."""
        self.is_full = config.train.method == "full"
        self._dtype = dtype_of(config.model.dtype)
        if self.is_full:
            transformer.requires_grad_(True)
        else:
            file = read_adapter(start) if start else None
            layers = file.layers(family, transformer) if file and not file.is_product else {}  # of a bare transformer
            inject(transformer, config.lora, config.lora_targets, config.seed)
            if file:
                file.require_family(family)
                start_from(transformer, file, layers, config.lora)
        if config.model.precision:
            compute_in_eight_bits(family.blocks(transformer), config.model.precision, device)
        if config.model.precision and not choice.streamed and not self._is_sharded:  # it came here to be rounded
            transformer.to(device)
        world.broadcast(trainable(transformer).values())
        transformer.train()
        self._set_up_blocks()
        self.parameters = trainable(transformer)

    def _set_up_blocks(self) -> None:
        """Recomputation, compilation, then streaming or sharding: each works on what the one before has made."""
        blocks = self.family.blocks(self.transformer)
        streamed = [blocks[place] for place in self._choice.waiting(len(blocks))]
        self._recompute(self._choice)
        if self._choice.compiled:
            compile_blocks(blocks)
        if streamed:  # the rest goes to the device; these come when it is their turn
            StreamedBlocks(streamed, self._device)
            self.transformer.to(self._device)
        if self._is_sharded:
            self._world.shard(self.transformer, blocks, self._device)
            if self._device.type == "cuda":
                self.transformer.to(self._device)  # buffers; parameters are there already

    @property
    def _is_sharded(self) -> bool:
        return self._world.size > 1 and self._config.train.distributed == "fsdp"

    def _recompute(self, choice: Choice) -> None:
        blocks = self.family.blocks(self.transformer)
        again = {id(blocks[place]) for place in choice.recomputed(len(blocks))}
        if again:
            recompute(self.transformer, again, choice.keeps_attention, choice.hosts_inputs)

    def let_go(self) -> None:
        """Give back what passes of the size so far have found their places in."""
        self._recompute(self._choice)

    def take_less_memory(self) -> bool:
        """Let every block compute all of its activations again, from inputs that wait in host memory if they may.

        False if that is what they do already.
        """
        now, blocks = self._choice, len(self.family.blocks(self.transformer))
        hosts = now.hosts_inputs or self._config.train.offload_inputs == "auto"
        if len(now.recomputed(blocks)) == blocks and now.hosts_inputs == hosts and not now.keeps_attention:
            return False
        self._choice = least = replace(now, first=None, every=1, keeps_attention=False, hosts_inputs=hosts)
        self._recompute(least)
        return True

    def velocity(self, batch: Batch) -> Tensor:
        """The velocity `(M, C)` of the target tokens of a batch."""
        inputs = ModelInputs(
            images=batch.noisy_images(),
            shapes=batch.shapes,
            text=batch.text,
            sigma=batch.sigma,
            guidance=self._config.train.guidance,
            padded=self._config.train.execution == "padded",
            # torch's compiler fails on diffusers' own blocks if several samples of one shape go through them at once.
            ragged=self._keeps_attention or (self._choice.compiled and len(batch.samples) > 1),
        )
        with self.computing():
            prediction, _ = batch.images.split(self.family.velocity(self.transformer, inputs))
        return prediction

    def base_velocity(self, batch: Batch) -> Tensor:
        """The same without the adapter, and without a gradient."""
        with torch.no_grad(), without_adapter(self.transformer):
            return self.velocity(batch)

    def computing(self) -> AbstractContextManager[Any]:
        """Weights that train are float32: where all do, autocast does the arithmetic in the configured dtype."""
        if not self.is_full or self._dtype == torch.float32:
            return nullcontext()
        # Without its cache, which would keep every gathered weight of a sharded model alive until the end.
        return torch.autocast(self._device.type, self._dtype, cache_enabled=False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without dropout and without gradients."""
        self.transformer.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.transformer.train()

    def write(self, folder: Path) -> Path:
        """Write what has trained: an adapter, or all of the transformer in diffusers' format. All ranks must call."""
        if self.is_full:
            weights = self._gathered(dict(self.transformer.named_parameters()), self._dtype)
            self._world.first(lambda: write_transformer(self.transformer, weights, folder))
            return folder
        tensors = self._gathered(adapter_tensors(self.transformer))
        self._world.first(lambda: self._write_adapter(tensors, folder / FILE_NAME))
        return folder / FILE_NAME

    def _write_adapter(self, tensors: dict[str, Tensor], file: Path) -> None:
        record = Record.of(self._config)
        if self._config.lora.type in ("lokr", "loha"):
            write_product(file, tensors, self.transformer.peft_config[ADAPTER].to_dict(), record)
            return
        layers = trained_layers(self.transformer, tensors)
        save_verified(file, layers, "diffusers", names_of(self.family, self.transformer), record)

    def _gathered(self, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        kept = {}
        for name, tensor in tensors.items():
            together = full_tensor(tensor)
            if self._world.is_first:
                kept[name] = together.to("cpu", dtype)
        return kept
