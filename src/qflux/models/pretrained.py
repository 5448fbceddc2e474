"""The model that a config names: its parts, loaded when they are asked for, on the device and in the dtype it says."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from qflux.config import Config
from qflux.errors import CheckpointError, ConfigError
from qflux.launch import launched
from qflux.memory.counting import MemoryCount
from qflux.memory.placing import free_memory, limit_memory, model_bytes, place
from qflux.models.encoding import encoder_of
from qflux.models.facts import Described, Facts
from qflux.models.family import Encoder, Family, TextCounter, text_limit
from qflux.models.loading import checkpoint_folder, load_transformer
from qflux.models.precision import dtype_of
from qflux.models.projection import ProjectedText, projection_weights
from qflux.models.registry import described, families_of, local_folder

_SIDE = 1024
"""Of the image that there has to be room for."""
_FOR_TEXT = 2**30
"""Bytes that a text encoder needs besides its weights."""
_FOR_KERNELS = 1.25
"""What convolutions take for themselves is not counted."""


class Pretrained:
    """A pretrained model on disk or on the hub. Nothing is kept: who asks for a part owns it, and may let it go."""

    def __init__(self, config: Config, family: Family) -> None:
        self.family = family
        self.settings = config.model
        self.device = device_of(config.model.device)
        self.dtype = dtype_of(config.model.dtype)
        self.text_limit = text_limit(config, family)
        self._config = config

    @cached_property
    def facts(self) -> Facts:
        """Of this checkpoint: the family's own, or those of the variant that it is."""
        name = self.settings.pretrained
        folder = local_folder(name)
        if not folder.is_dir():  # both descriptions at once: what is known must not depend on what else was fetched
            folder = checkpoint_folder(name, ("transformer",), files="config.json")
        self._require_family(described(name, folder))
        return self.family.facts.of(described(name, folder, self.settings.transformer))

    def require_family(self) -> None:
        """An error if what is known here of the checkpoint is of another family; nothing is fetched for it."""
        self._require_family(described(self.settings.pretrained))

    def _require_family(self, checkpoint: Described) -> None:
        own, override, kind = self.family.facts, self.settings.transformer, checkpoint.transformer
        may_be = families_of(checkpoint)
        if own.name not in may_be and (may_be or kind is not None):
            holds = f" holds a {kind}, which" if kind not in (None, own.transformer) else ""
            raise CheckpointError(
                f"model.pretrained: {checkpoint.name}{holds} is not of the family {own.name}",
                f"set family: {may_be[0]}." if may_be else "give a checkpoint of this family.",
            )
        if checkpoint.pipeline is not None and checkpoint.pipeline in own.refused:
            raise CheckpointError(
                f"model.pretrained: {checkpoint.name} is for {checkpoint.pipeline}: {own.refused[checkpoint.pipeline]}",
                f"it can't be trained or used here; {own.hub_id} can.",
            )
        if override is not None:
            self._require_override(checkpoint, described(checkpoint.name, override=override))

    def _require_override(self, checkpoint: Described, instead: Described) -> None:
        own, folder = self.family.facts, self.settings.transformer
        if instead.transformer not in (None, own.transformer):
            raise CheckpointError(
                f"model.transformer: {folder} holds a {instead.transformer}, which is not of the family {own.name}",
                "give a transformer of this family.",
            )
        if None not in (found := (checkpoint.text_channels, instead.text_channels)) and found[0] != found[1]:
            raise CheckpointError(
                f"model.transformer: {folder} takes text of {found[1]} channels, and model.pretrained gives {found[0]}",
                "set model.pretrained to the checkpoint that it was made from.",
            )

    def loaded(self, parts: Sequence[str]) -> Any:
        """These parts in host memory, under the names that the family's pipeline has for them."""
        self.facts  # noqa: B018  (a checkpoint of another family is an error that says so)
        return self.family.load(self.settings.pretrained, parts, self.dtype, torch.device("cpu"))

    def components(self, parts: Sequence[str]) -> Any:
        """The same on the device."""
        components = self.loaded(parts)
        self.place(components)
        return components

    def place(self, components: Any) -> None:
        """Put all models of some components on the device; blocks that there is no room for wait in host memory.

        The image encoder stays, and leaves room for an image. A transformer comes next: it runs many times where text
        encoders run once. Of these, small ones have first choice.
        """
        limit_memory(self.device, self._config.memory)
        models = {name: part for name, part in vars(components).items() if isinstance(part, nn.Module)}
        images = [models.pop(part) for part in self.family.image_parts if part in models]
        for model in images:
            model.to(self.device)
        transformer = [models.pop("transformer")] if "transformer" in models else []
        free = free_memory(self.device, self._config.memory)
        placed = [*transformer, *sorted(models.values(), key=model_bytes)]
        if placed:
            there = sum(model_bytes(model) for model in placed if self._is_there(model))
            room = None if free is None else free + there
            place(placed, self.device, room, 0 if room is None else self._workspace(components if images else None))

    def _is_there(self, model: nn.Module) -> bool:
        """On the device already: what it takes is not free, and is its own."""
        return self.device.type == "cuda" and next(model.parameters()).device.type == "cuda"

    def _workspace(self, components: Any) -> int:
        """Bytes that the models themselves leave free: for an image of a megapixel, if there is an image encoder."""
        if components is None:
            return _FOR_TEXT
        image = self.family.image_parts[0]
        with torch.device("meta"):
            vae = type(getattr(components, image)).from_config(getattr(components, image).config)
        empty = type(components)(**{image: vae.to(self.dtype).requires_grad_(False)})
        encoder, side = self.family.encoder(empty, self.text_limit), _SIDE // self.family.pixels_per_token
        tokens = torch.empty(side**2, self.family.facts.image_channels, dtype=self.dtype, device="meta")
        with torch.no_grad(), MemoryCount([*vae.parameters(), *vae.buffers()]) as count:
            encoder.decode_image(tokens, (1, side, side))
        return int(_FOR_KERNELS * count.peak)

    @property
    def first_stop(self) -> torch.device:
        """Where a transformer goes before it is placed: bitsandbytes quantizes on the GPU only."""
        return self.device if self.settings.quantization == "nf4" else torch.device("cpu")

    def transformer(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
        """The transformer, frozen; in another dtype or place than the config's if one is given."""
        return load_transformer(
            self.family.transformer, self.settings, dtype or self.dtype, device if device is not None else self.device
        )

    def encoder(self, *kinds: str) -> Encoder:
        """The text encoders ("text"), the image encoder ("image"), or both; text is as training takes it."""
        parts = {"text": self.family.text_parts, "image": self.family.image_parts}
        wanted = [part for kind in kinds for part in parts[kind]]
        encoder = encoder_of(self.family, self.components(wanted), self.text_limit)
        weights = projection_weights(self._config) if "text" in kinds else None
        return ProjectedText.of(encoder, weights, self.device, self.dtype) if weights else encoder

    def scheduler(self) -> Any:
        """The noise schedule of the checkpoint."""
        return self.loaded(("scheduler",)).scheduler

    def text_counter(self) -> TextCounter:
        """How long a prompt is, from the checkpoint's tokenizer."""
        return self.family.text_counter(self.loaded(self.family.tokenizer_parts), self.text_limit)

    def release_memory(self) -> None:
        """Give back what parts that are gone have left allocated."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def device_of(name: str) -> torch.device:
    """The device that a config calls by this name; of several processes on a machine each takes its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{launched().local_rank}"
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
