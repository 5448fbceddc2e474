"""What a checkpoint is worth to the eye: edits of a few held-out samples and of somebody's own images.

All are drawn as one ragged batch, and measured for what they did to what they should have left alone. Nothing but the
cache and the VAE's decoder is needed. All ranks take part: a sharded model can't run on one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from qflux.config import Config
from qflux.data.encoded import COMPLETE, NO_CAPTION, EncodedSample, Variant
from qflux.data.images.decode import ImageFile, load_rgb, load_rgba, to_rgb
from qflux.data.images.pixels import to_image
from qflux.data.lint.alignment import drift_between
from qflux.data.sample import Sample
from qflux.errors import DataError
from qflux.files.hashing import seed_of
from qflux.measures.edit import measure
from qflux.models.facts import Facts
from qflux.models.family import Encoder
from qflux.models.precision import dtype_of
from qflux.models.pretrained import Pretrained
from qflux.ragged.shapes import ImageShape
from qflux.ragged.transfer import upload
from qflux.runs.journal import DrawnEdit
from qflux.sampling.likeness import Likeness
from qflux.sampling.prepare import Edit, Preparer
from qflux.sampling.sampler import Prepared, Sampler
from qflux.training.batches import SampleReader
from qflux.training.model import TrainedModel


@dataclass(frozen=True)
class PreparedEdit:
    """An edit of somebody's own, encoded."""

    name: str
    prompt: str
    prepared: Prepared
    controls: tuple[Image.Image, ...]
    """At the size they are edited at."""


def prepare_own_edits(config: Config, pretrained: Pretrained) -> list[PreparedEdit]:
    """The edits of `validation.edits`, at the sizes that the run trains at; their tensors on the host.

    The encoders are gone before the transformer comes.
    """
    if not config.validation.edits:
        return []
    encoder = pretrained.encoder("text", "image")
    prepare = Preparer(pretrained.family, encoder, config.data.processor, pretrained.device, pretrained.dtype)
    made: list[PreparedEdit] = []
    try:
        for number, own in enumerate(config.validation.edits):
            images = tuple(load_rgba(ImageFile(path)) for path in own.images)
            name = own.name or (own.images[0].name if own.images else f"edit {number + 1}")
            same = sum(other.name.split(" #")[0] == name for other in made)
            name = f"{name} #{same + 1}" if same else name  # reports tell edits apart by their names
            # Guided validation is against the empty prompt, as for held-out samples.
            negative = "" if config.validation.true_cfg_scale > 1 else None
            _, transforms = prepare.transforms([image.size for image in images])
            shown = tuple(transform(to_rgb(image)) for transform, image in zip(transforms, images, strict=True))
            prepared = prepare(Edit(images, own.prompt, negative_prompt=negative, seed=own.seed))
            made.append(PreparedEdit(name, own.prompt, prepared.to("cpu"), shown))
        return made
    finally:
        del prepare, encoder
        pretrained.release_memory()


class DrawnEdits:
    """Edits of held-out samples, and own ones. Of many samples, those are chosen that differ most in sizes."""

    def __init__(
        self,
        config: Config,
        facts: Facts,
        samples: Sequence[Sample],
        reader: SampleReader,
        encoder: Encoder,
        scheduler: Any,
        device: torch.device,
        own: Sequence[PreparedEdit] = (),
    ) -> None:
        self._own = list(own)
        self._config = config
        self._facts = facts
        self._reader = reader
        self._encoder = encoder
        self._scheduler = scheduler
        self._device = device
        self._dtype = dtype_of(config.model.dtype)
        self._samples = _varied(samples, config.validation.images)
        self._through_vae: dict[str, tuple[Image.Image, Image.Image | None]] = {}
        named = config.validation.perceptual
        self._likeness = Likeness(named) if named else None

    def __call__(self, model: TrainedModel, steps: int | None = None, count: int | None = None) -> list[DrawnEdit]:
        """Draw them all (or `count`), as one batch; by default with the configured number of steps."""
        config, chosen = self._config, self._samples[:count]
        own = self._own[: None if count is None else max(0, count - len(chosen))]
        encoded = [self._encoded(sample, COMPLETE) for sample in chosen]
        prepared = [self._prepare(sample, item) for sample, item in zip(chosen, encoded, strict=True)]
        prepared += [edit.prepared.to(self._device) for edit in own]
        configured = config.validation.num_inference_steps or config.predict.num_inference_steps
        sampler = Sampler(
            model.family, model.transformer, self._scheduler, self._facts.sigmas, config.predict.keep_prefix
        )
        with model.evaluating(), model.computing():
            latents = sampler(
                prepared,
                steps or configured or self._facts.num_inference_steps,
                self._facts.guidance_scale if config.predict.guidance_scale is None else config.predict.guidance_scale,
                config.validation.true_cfg_scale,
            )
        drawn = [self._drawn(*item) for item in zip(chosen, encoded, latents[: len(chosen)], strict=True)]
        return drawn + [self._drawn_own(*item) for item in zip(own, latents[len(chosen) :], strict=True)]

    def _encoded(self, sample: Sample, variant: Variant) -> EncodedSample:
        return self._reader.finish(self._reader.read(sample, variant))

    def _prepare(self, sample: Sample, encoded: EncodedSample) -> Prepared:
        negative = None
        if self._config.validation.true_cfg_scale > 1:
            negative = self._encoded(sample, NO_CAPTION).text.to(self._device, self._dtype)
        tokens, channels = encoded.target.shape
        generator = torch.Generator().manual_seed(seed_of("held-out edit", self._config.seed, sample.id))
        noise = torch.randn(tokens, channels, generator=generator)
        controls = torch.cat([*encoded.controls, encoded.target[:0]])
        return Prepared(
            noise=upload(noise.to(self._dtype), self._device),
            controls=upload(controls.to(self._dtype), self._device),
            shapes=encoded.shapes,
            text=encoded.text.to(self._device, self._dtype),
            negative=negative,
        )

    def _drawn(self, sample: Sample, encoded: EncodedSample, latents: Tensor) -> DrawnEdit:
        output, mask = self._decode(latents, encoded.shapes.targets[0]), _mask(encoded)
        wanted, control = self._references(encoded)
        drift = drift_between(control, output, mask) if control is not None else None
        latents_given = zip((encoded.target, *encoded.controls), encoded.shapes.images, strict=True)
        given = [self._given(sample, number, *item) for number, item in enumerate(latents_given)]
        shown = None if mask is None else _mask_picture(mask, output.size)
        measures = measure(output, control, wanted, mask, original=given[0])
        if self._likeness is not None:
            measures = self._likeness.added(measures, output, control, wanted)
        return DrawnEdit(sample.name, sample.prompt, output, given[0], tuple(given[1:]), shown, drift, measures)

    def _references(self, encoded: EncodedSample) -> tuple[Image.Image, Image.Image | None]:
        """The wanted image, and the control if it is of the same size, through the VAE: what that does is no edit's."""
        if encoded.id not in self._through_vae:
            (target,), controls = encoded.shapes.targets, encoded.shapes.controls
            control = self._decode(encoded.controls[0], target) if controls[:1] == (target,) else None
            self._through_vae[encoded.id] = self._decode(encoded.target, target), control
        return self._through_vae[encoded.id]

    def _drawn_own(self, edit: PreparedEdit, latents: Tensor) -> DrawnEdit:
        output = self._decode(latents, edit.prepared.target)
        alike = bool(edit.controls) and edit.controls[0].size == output.size
        drift = drift_between(edit.controls[0], output, None) if alike else None
        return DrawnEdit(edit.name, edit.prompt, output, controls=edit.controls, drift=drift)

    def _given(self, sample: Sample, number: int, latents: Tensor, shape: ImageShape) -> Image.Image:
        """An image of a sample as it trains; from its file, or through the VAE where there is none any more."""
        if sample.images is not None:
            image = sample.images.all[number]
            with suppress(DataError):
                return image.transform(load_rgb(image.ref))
        return self._decode(latents, shape)

    def _decode(self, latents: Tensor, shape: ImageShape) -> Image.Image:
        tokens = latents.to(self._device, self._dtype)
        with torch.no_grad():
            return to_rgb(to_image(self._encoder.decode_image(tokens, shape)))


def _varied(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples: first one of each combination of sizes, then the rest in order."""
    seen: set[Any] = set()
    first: list[Sample] = []
    rest: list[Sample] = []
    for sample in samples:
        (rest if sample.shapes in seen else first).append(sample)
        seen.add(sample.shapes)
    return [*first, *rest][:count]


def _mask(encoded: EncodedSample) -> NDArray[np.float32] | None:
    """The edited region on the target's token grid."""
    if encoded.mask is None:
        return None
    _, rows, columns = encoded.shapes.targets[0]
    return encoded.mask.float().reshape(rows, columns).numpy()


def _mask_picture(mask: NDArray[np.float32], size: tuple[int, int]) -> Image.Image:
    """The edited region in white, at the size of the target."""
    small = Image.fromarray((255 * mask).round().astype(np.uint8))
    return small.resize(size, Image.Resampling.NEAREST).convert("RGB")
