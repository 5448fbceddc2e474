"""The model that a config names: its parts, loaded when they are asked for, on the device and in the dtype it says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from qflux.config import Config
from qflux.errors import CheckpointError, ConfigError
from qflux.launch import launched
from qflux.models.facts import Described, Facts
from qflux.models.family import Encoder, Family, TextCounter, text_limit
from qflux.models.loading import checkpoint_folder, load_transformer
from qflux.models.precision import dtype_of
from qflux.models.projection import ProjectedText, projection_weights
from qflux.models.registry import described, families_of, local_folder


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

    def components(self, parts: Sequence[str]) -> Any:
        """These parts, under the names that the family's pipeline has for them."""
        self.facts  # noqa: B018  (a checkpoint of another family is an error that says so)
        return self.family.load(self.settings.pretrained, parts, self.dtype, self.device)

    def transformer(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
        """The transformer, frozen; in another dtype or place than the config's if one is given."""
        return load_transformer(
            self.family.transformer, self.settings, dtype or self.dtype, device if device is not None else self.device
        )

    def encoder(self, *kinds: str) -> Encoder:
        """The text encoders ("text"), the image encoder ("image"), or both; text is as training takes it."""
        parts = {"text": self.family.text_parts, "image": self.family.image_parts}
        wanted = [part for kind in kinds for part in parts[kind]]
        encoder = self.family.encoder(self.components(wanted), self.text_limit)
        weights = projection_weights(self._config) if "text" in kinds else None
        return ProjectedText.of(encoder, weights, self.device, self.dtype) if weights else encoder

    def scheduler(self) -> Any:
        """The noise schedule of the checkpoint."""
        return self.components(("scheduler",)).scheduler

    def text_counter(self) -> TextCounter:
        """How long a prompt is, from the checkpoint's tokenizer."""
        return self.family.text_counter(self.components(self.family.tokenizer_parts), self.text_limit)

    def release_memory(self) -> None:
        """Give back what parts that are gone have left allocated."""
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
