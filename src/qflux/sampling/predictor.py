"""Edits: prepare → schedule → denoise → decode. A batch of any sizes; each result is what it would be alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from qflux.adapters.attach import Weighted, attach_all
from qflux.adapters.files import Record, read_adapter
from qflux.config import Config, ProcessorSettings, load_config
from qflux.data.images.pixels import to_image
from qflux.errors import ConfigError
from qflux.files.hashing import file_hash
from qflux.memory.placing import limit_memory
from qflux.models.encoding import encoder_of
from qflux.models.facts import Facts
from qflux.models.family import Family, text_limit
from qflux.models.loading import transformer_identity
from qflux.models.precision import compute_in_eight_bits
from qflux.models.pretrained import Pretrained
from qflux.ragged.shapes import ImageShape
from qflux.sampling.prepare import Edit, Preparer, finished
from qflux.sampling.sampler import OnStep, Prepared, Sampler
from qflux.version import VERSION

__all__ = ["Edit", "Predictor", "load_predictor", "provenance"]

logger = logging.getLogger(__name__)


class Predictor:
    """A model ready to edit. Images reach their size by `processor`, or without one as in the reference pipeline."""

    def __init__(
        self,
        family: Family,
        components: Any,
        config: Config,
        processor: ProcessorSettings | None = None,
        facts: Facts | None = None,
    ) -> None:
        """`facts` are those of the checkpoint, by default its family's."""
        self._facts = facts or family.facts
        self._transformer = components.transformer
        self._sampler = Sampler(
            family, components.transformer, components.scheduler, self._facts.sigmas, config.predict.keep_prefix
        )
        self._encoder = encoder_of(family, components, text_limit(config, family))
        self._settings = config.predict
        self.prepare = Preparer(
            family,
            self._encoder,
            processor,
            components.transformer.device,
            components.transformer.dtype,
            self._facts.negative_prompt if self._cfg_scale > 1 else None,
        )
        """Encodes an edit."""
        self._warned: set[str] = set()

    def __call__(
        self,
        edits: Sequence[Edit],
        steps: int | None = None,
        guidance: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[Image.Image]:
        """The edited images; steps and guidance are the config's unless given."""
        return self.draw([self.prepare(edit) for edit in edits], steps, guidance, on_step)

    def draw(
        self,
        prepared: Sequence[Prepared],
        steps: int | None = None,
        guidance: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[Image.Image]:
        """The images of prepared edits, as one batch."""
        latents = self._denoised(prepared, steps, guidance, on_step)
        with torch.no_grad():
            pixels = [self._encoder.decode_image(t, item.target) for t, item in zip(latents, prepared, strict=True)]
        drawn = zip(pixels, prepared, strict=True)
        return [finished(to_image(image), item.exact, item.kept) for image, item in drawn]

    def latents(
        self,
        edits: Sequence[Edit],
        steps: int | None = None,
        guidance: float | None = None,
        on_step: OnStep | None = None,
    ) -> list[tuple[Tensor, ImageShape]]:
        """Denoised tokens of every edit, with their shapes."""
        prepared = [self.prepare(edit) for edit in edits]
        tokens = self._denoised(prepared, steps, guidance, on_step)
        return [(latents, item.target) for latents, item in zip(tokens, prepared, strict=True)]

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, edits are those of the base."""
        has_some = bool(getattr(self._transformer, "peft_config", None))
        if has_some:
            self._transformer.disable_lora()
        try:
            yield
        finally:
            if has_some:
                self._transformer.enable_lora()

    def settings(self, steps: int | None = None, guidance: float | None = None) -> dict[str, Any]:
        """Everything besides the edit that its image depends on."""
        settings, defaults = self._settings, self._facts
        configured = defaults.guidance_scale if settings.guidance_scale is None else settings.guidance_scale
        return {
            "num_inference_steps": steps or settings.num_inference_steps or defaults.num_inference_steps,
            "guidance_scale": configured if guidance is None else guidance,
            "true_cfg_scale": self._cfg_scale,
            "preprocessing": self.prepare.description,
            **({} if settings.keep_prefix or not defaults.shares_prefix else {"keep_prefix": False}),
        }

    @property
    def _cfg_scale(self) -> float:
        configured = self._settings.true_cfg_scale
        return self._facts.true_cfg_scale if configured is None else configured

    def _warn_of_levels(self, steps: int) -> None:
        levels = len(self._facts.sigmas)
        if levels not in (0, steps):
            self._warn_once(
                f"the checkpoint's own noise levels are for {levels} steps; {steps} are spread evenly instead"
            )

    def _denoised(
        self, prepared: Sequence[Prepared], steps: int | None, guidance: float | None, on_step: OnStep | None
    ) -> list[Tensor]:
        chosen = self.settings(steps, guidance)
        self._warn_of_guidance(prepared, chosen["true_cfg_scale"])
        self._warn_of_levels(chosen["num_inference_steps"])
        return self._sampler(
            prepared,
            chosen["num_inference_steps"],
            chosen["guidance_scale"],
            chosen["true_cfg_scale"],
            on_step,
        )

    def _warn_of_guidance(self, prepared: Sequence[Prepared], scale: float) -> None:
        """Say once what has no effect: guidance that is not told, a negative prompt at scale 1, a scale without one."""
        told = getattr(self._transformer.config, "guidance_embeds", False)
        if self._settings.guidance_scale is not None and not told:
            self._warn_once(
                f"predict.guidance_scale {self._settings.guidance_scale:g} has no effect: this model is not told any; "
                "predict.true_cfg_scale guides it"
            )
        has_negative = any(item.negative is not None for item in prepared)
        if has_negative and scale <= 1:
            self._warn_once(f"the negative prompt has no effect: predict.true_cfg_scale is {scale:g}, not above 1")
        if not has_negative and (self._settings.true_cfg_scale or 0) > 1:
            self._warn_once(
                f"predict.true_cfg_scale {scale:g} has no effect without a negative prompt; a space is one (' ')"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


def load_predictor(pretrained: Pretrained, config: Config, adapters: Sequence[Weighted] = ()) -> Predictor:
    """Everything loaded for predictions, with any number of adapters."""
    family = pretrained.family
    limit_memory(pretrained.device, config.memory)  # before anything is loaded there
    components = pretrained.loaded(("scheduler", *family.text_parts, *family.image_parts))
    components.transformer = pretrained.transformer(device=pretrained.first_stop)
    records = attach_all(components.transformer, family, adapters) if adapters else []
    components.transformer.requires_grad_(False)  # adapters are placed like everything else
    if config.model.precision:
        compute_in_eight_bits(family.blocks(components.transformer), config.model.precision, pretrained.device)
    pretrained.place(components)
    return Predictor(family, components, config, _preprocessing(config, records), pretrained.facts)


def provenance(config: Config, predictor: Predictor, adapters: Sequence[Weighted]) -> dict[str, Any]:
    """What an image depends on besides its edit; it is written into the file."""
    files = [(read_adapter(adapter.path).path, adapter.weight) for adapter in adapters]
    return {
        "software": f"qflux {VERSION}",
        "family": config.family,
        "model": Path(config.model.pretrained).name,
        "weights": transformer_identity(config.model),
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "precision": config.model.precision,
        "adapters": [{"name": file.name, "sha256": file_hash(file), "weight": weight} for file, weight in files],
        **predictor.settings(),
    }


def _preprocessing(config: Config, records: Sequence[Record]) -> ProcessorSettings | None:
    """How images reach their size; none: as in the reference pipeline."""
    if config.predict.preprocessing == "config":
        return config.data.processor
    known = [recorded_preprocessing(record) for record in records if record.preprocessing]
    if not known or config.predict.preprocessing == "pipeline":
        return None
    recorded, *others = known
    if any(other != recorded for other in others):
        logger.warning("the LoRAs were trained with different preprocessing; the first one's is used")
    values = config.dump()
    try:
        return load_config({**values, "data": {**values["data"], "processor": recorded}}).data.processor
    except ConfigError as error:
        logger.warning("the LoRA's preprocessing can't be used, the pipeline's is: %s", error.problem)
        return None


def recorded_preprocessing(record: Record) -> dict[str, Any]:
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
