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
from qflux.models.loading import checkpoint_folder, load_transformer, transformer_layer
from qflux.models.precision import dtype_of
from qflux.models.projection import ProjectedText
from qflux.models.registry import described, family_of


class Pretrained:
    """A pretrained model on disk or on the hub. Nothing is kept: who asks for a part owns it, and may let it go."""

    def __init__(self, config: Config, family: Family) -> None:
        self.family = family
        self.settings = config.model
        self.device = device_of(config.model.device)
        self.dtype = dtype_of(config.model.dtype)
        self.text_limit = text_limit(config, family)
        self.projects_text = config.projects_text

    @cached_property
    def facts(self) -> Facts:
        """Of this checkpoint: the family's own, or those of the variant that it is."""
        name = self.settings.pretrained
        checkpoint = described(name, checkpoint_folder(name, ()))
        self._require_family(checkpoint)
        return self.family.facts.of(checkpoint)

    def require_family(self) -> None:
        """An error if what is on this machine of the checkpoint is of another family; nothing is fetched for it."""
        self._require_family(described(self.settings.pretrained))

    def _require_family(self, checkpoint: Described) -> None:
        if checkpoint.transformer in (None, self.family.facts.transformer):
            return
        right = family_of(checkpoint)
        raise CheckpointError(
            f"model.pretrained: {checkpoint.name} holds a {checkpoint.transformer}, "
            f"which is not of the family {self.family.name}",
            f"set family: {right}." if right else "give a checkpoint of this family.",
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
        layer = self.facts.text_projection
        if "text" not in kinds or not self.projects_text or layer is None:
            return encoder
        weights = transformer_layer(self.settings, layer)
        weight, bias = (
            None if tensor is None else tensor.to(self.device, self.dtype)
            for tensor in (weights["weight"], weights.get("bias"))
        )
        assert weight is not None
        return ProjectedText(encoder, weight, bias)

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
