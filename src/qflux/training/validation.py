"""What a checkpoint is worth: loss on held-out samples, and edits of some of them.

1. `HeldOutLoss`    the loss at noise and noise levels that never change, so that checkpoints can be compared
2. `DrawnEdits`     edits of a few held-out samples of different sizes and of somebody's own images, as one ragged
                    batch, and how far they drifted

Nothing but the cache and the VAE's decoder is needed. All ranks take part: a sharded model can't run on one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from qflux.config import Config
from qflux.data.batch import EditBatch
from qflux.data.encoded import WHOLE, EncodedExample, TextEmbedding, Variant
from qflux.data.images.decode import ImageFile, load_rgb
from qflux.data.images.pixels import to_image
from qflux.data.lint.alignment import Drift, drift_between
from qflux.data.reader import read_ahead
from qflux.errors import DataError
from qflux.files.hashing import key_of, seed_of
from qflux.losses.mse import MseLoss
from qflux.losses.timesteps import NoiseLevels, NoiseShift
from qflux.models.family import Encoder
from qflux.ragged.shapes import ImageShape
from qflux.ragged.transfer import upload
from qflux.sampling.prepare import Edit, Preparer
from qflux.sampling.sampler import Prepared, Sampler
from qflux.training.batches import Provider, read_named
from qflux.training.distributed import World
from qflux.training.encode import PlannedSample, TrainingSample
from qflux.training.model import TrainedModel

NO_CAPTION = Variant(caption=False)


@dataclass(frozen=True)
class Validation:
    """What was found at one checkpoint."""

    loss: float
    """Mean over all target tokens of all held-out samples at all noise levels."""
    loss_by_level: list[float]
    """The same for each noise level, the least noise first."""


@dataclass(frozen=True)
class _Trial:
    """A sample at one of its fixed noise levels."""

    sample: TrainingSample
    level: int


class HeldOutLoss:
    """Plain squared error of the velocity; masks and weightings are left out, so that runs can be compared too."""

    def __init__(
        self,
        config: Config,
        samples: Sequence[TrainingSample],
        provider: Provider,
        noise: NoiseLevels,
        world: World,
        device: torch.device,
    ) -> None:
        self._config = config
        self._noise = noise
        self._provider = provider
        self._world = world
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._levels = config.validation.noise_levels
        chosen = list(samples)[: config.validation.max_samples]
        self._trials = [_Trial(sample, level) for sample in chosen for level in range(self._levels)]
        self._batches = self._packed()
        timesteps = [config.loss.timesteps.model_dump(mode="json")]
        timesteps += [asdict(noise.shift)] if noise.shift != NoiseShift() else []
        self.measure = key_of([sample.address for sample in chosen], self._levels, config.seed, *timesteps)[:16]
        """Losses of the same measure can be compared."""

    def __bool__(self) -> bool:
        return bool(self._trials)

    def __call__(self, model: TrainedModel) -> Validation:
        """Measure a model."""
        terms = torch.zeros(len(self._trials), device=self._device)
        # Every rank runs as many batches as the others; where there is none left, one that does not count.
        rounds = -(-len(self._batches) // self._world.size)
        mine = [self._world.rank + self._world.size * turn for turn in range(rounds)]
        numbers = [number if number < len(self._batches) else None for number in mine]
        batches = [self._batches[number or 0] for number in numbers]
        with model.evaluating():
            read = read_ahead(self._read, batches, self._config.data.num_workers)
            for number, places, content in zip(numbers, batches, read, strict=True):
                batch = self._collate(places, content)
                errors = MseLoss()(model.velocity(batch), batch.velocity(), reduction="none").mean(-1)
                if number is not None:
                    found = torch.stack([error.mean() for error in errors.split(batch.target_lengths)])
                    terms[places[0] : places[0] + len(places)] = found
        values = self._world.sum_(terms).double().cpu().numpy()
        tokens = np.array([trial.sample.target_tokens for trial in self._trials], dtype=np.float64)
        levels = np.array([trial.level for trial in self._trials])
        return Validation(
            float(np.average(values, weights=tokens)),
            [float(np.average(values[levels == k], weights=tokens[levels == k])) for k in range(self._levels)],
        )

    def _packed(self) -> list[list[int]]:
        """Trials in order, as many to a batch as have the length of the longest: the same batches in every run."""
        lengths = [self._provider.text_tokens(t.sample) + t.sample.image_tokens for t in self._trials]
        batches: list[list[int]] = []
        room = 0
        for index, tokens in enumerate(lengths):
            if tokens > room or not batches:
                batches.append([])
                room = max(lengths)
            batches[-1].append(index)
            room -= tokens
        return batches

    def _read(self, places: list[int]) -> list[Any]:
        return [read_named(self._provider, self._trials[place].sample, WHOLE) for place in places]

    def _collate(self, places: list[int], content: list[Any]) -> EditBatch:
        examples = [self._provider.finish(item) for item in content]
        drawn = [
            self._noise.fixed_draw(
                self._config.seed,
                example.id,
                self._trials[place].level,
                self._levels,
                example.target_tokens,
                example.latents[0].shape[-1],
            )
            for place, example in zip(places, examples, strict=True)
        ]
        noise, sigma = [noise for _, noise in drawn], [sigma for sigma, _ in drawn]
        return EditBatch.collate(examples, noise, sigma, self._device, self._dtype)


@dataclass(frozen=True)
class DrawnEdit:
    """A held-out sample or an own image, edited. What is known is shown as it was given, at its training size."""

    name: str
    prompt: str
    output: Image.Image
    wanted: Image.Image | None = None
    controls: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None
    drift: Drift | None = None
    """Against the first control, outside the mask."""


@dataclass(frozen=True)
class PreparedEdit:
    """An edit of somebody's own, encoded."""

    name: str
    prompt: str
    prepared: Prepared
    controls: tuple[Image.Image, ...]
    """At the size they are edited at."""


def prepare_own(config: Config, prepare: Preparer) -> list[PreparedEdit]:
    """The edits of `validation.edits`, at the sizes that the run trains at; their tensors on the host."""
    made: list[PreparedEdit] = []
    for number, own in enumerate(config.validation.edits):
        images = tuple(load_rgb(ImageFile(path)) for path in own.images)
        name = own.name or (own.images[0].name if own.images else f"edit {number + 1}")
        same = sum(other.name.split(" #")[0] == name for other in made)
        name = f"{name} #{same + 1}" if same else name  # reports tell edits apart by their names
        # Guided validation is against the empty prompt, as for held-out samples.
        negative = "" if config.validation.true_cfg_scale > 1 else None
        _, transforms = prepare.transforms([image.size for image in images])
        shown = tuple(transform(image) for transform, image in zip(transforms, images, strict=True))
        prepared = prepare(Edit(images, own.prompt, negative_prompt=negative, seed=own.seed))
        made.append(PreparedEdit(name, own.prompt, prepared.to("cpu"), shown))
    return made


class DrawnEdits:
    """Edits of held-out samples, and own ones. Of many samples, those are chosen that differ most in sizes."""

    def __init__(
        self,
        config: Config,
        samples: Sequence[TrainingSample],
        provider: Provider,
        encoder: Encoder,
        scheduler: Any,
        device: torch.device,
        own: Sequence[PreparedEdit] = (),
    ) -> None:
        self._own = list(own)
        self._config = config
        self._provider = provider
        self._encoder = encoder
        self._scheduler = scheduler
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._samples = _varied(samples, config.validation.images)

    def __bool__(self) -> bool:
        return bool(self._samples or self._own)

    def __call__(self, model: TrainedModel, steps: int | None = None, count: int | None = None) -> list[DrawnEdit]:
        """Draw them all (or `count`), as one batch; by default with the configured number of steps."""
        config, chosen = self._config, self._samples[:count]
        own = self._own[: None if count is None else max(0, count - len(chosen))]
        examples = [self._example(sample, WHOLE) for sample in chosen]
        prepared = [self._prepare(sample, example) for sample, example in zip(chosen, examples, strict=True)]
        prepared += [edit.prepared.to(self._device) for edit in own]
        defaults = model.family.defaults
        sampler = Sampler(model.family, model.transformer, self._scheduler)
        with model.evaluating(), model.computing():
            latents = sampler(
                prepared,
                steps
                or config.validation.num_inference_steps
                or config.predict.num_inference_steps
                or defaults.num_inference_steps,
                config.predict.guidance_scale,
                config.validation.true_cfg_scale,
            )
        drawn = [self._drawn(*item) for item in zip(chosen, examples, latents[: len(chosen)], strict=True)]
        return drawn + [self._drawn_own(*item) for item in zip(own, latents[len(chosen) :], strict=True)]

    def _example(self, sample: TrainingSample, variant: Variant) -> EncodedExample:
        return self._provider.finish(read_named(self._provider, sample, variant))

    def _prepare(self, sample: TrainingSample, example: EncodedExample) -> Prepared:
        negative = None
        if self._config.validation.true_cfg_scale > 1:
            negative = self._text(self._example(sample, NO_CAPTION).text)
        channels = example.latents[0].shape[-1]
        generator = torch.Generator().manual_seed(seed_of("held-out edit", self._config.seed, sample.id))
        noise = torch.randn(example.target_tokens, channels, generator=generator)
        controls = torch.cat([*example.latents[1:], example.latents[0][:0]])
        return Prepared(
            noise=upload(noise.to(self._dtype), self._device),
            controls=upload(controls.to(self._dtype), self._device),
            img_shapes=example.img_shapes,
            text=self._text(example.text),
            negative=negative,
        )

    def _text(self, text: TextEmbedding) -> TextEmbedding:
        pooled = None if text.pooled is None else upload(text.pooled.to(self._dtype), self._device)
        return TextEmbedding(upload(text.tokens.to(self._dtype), self._device), pooled)

    def _drawn(self, sample: TrainingSample, example: EncodedExample, latents: Tensor) -> DrawnEdit:
        output = self._decode(latents, example.img_shapes[0])
        drift = None
        if example.img_shapes[:1] == example.img_shapes[1:2]:
            # Both through the VAE: what it does to an image is no drift.
            drift = drift_between(self._decode(example.latents[1], example.img_shapes[1]), output, _mask(example))
        wanted, *controls = (self._given(sample, example, index) for index in range(len(example.latents)))
        name, prompt, mask = sample.example.name, sample.example.prompt, _mask_picture(example)
        return DrawnEdit(name, prompt, output, wanted, tuple(controls), mask, drift)

    def _drawn_own(self, edit: PreparedEdit, latents: Tensor) -> DrawnEdit:
        output = self._decode(latents, edit.prepared.target)
        alike = bool(edit.controls) and edit.controls[0].size == output.size
        drift = drift_between(edit.controls[0], output, None) if alike else None
        return DrawnEdit(edit.name, edit.prompt, output, controls=edit.controls, drift=drift)

    def _given(self, sample: TrainingSample, example: EncodedExample, index: int) -> Image.Image:
        """An image of a sample as it trains; from its file, or through the VAE where there is none any more."""
        if isinstance(sample, PlannedSample):
            with suppress(DataError):
                return sample.transforms[index](load_rgb(sample.example.images[index]))
        return self._decode(example.latents[index], example.img_shapes[index])

    def _decode(self, latents: Tensor, shape: ImageShape) -> Image.Image:
        tokens = latents.to(self._device, self._dtype)
        with torch.no_grad():
            return to_image(self._encoder.decode_image(tokens, shape))


def _varied(samples: Sequence[TrainingSample], count: int) -> list[TrainingSample]:
    """`count` samples: first one of each combination of sizes, then the rest in order."""
    seen: set[Any] = set()
    first: list[TrainingSample] = []
    rest: list[TrainingSample] = []
    for sample in samples:
        (rest if sample.img_shapes in seen else first).append(sample)
        seen.add(sample.img_shapes)
    return [*first, *rest][:count]


def _mask(example: EncodedExample) -> NDArray[np.float32] | None:
    """The edited region on the target's token grid."""
    if example.mask is None:
        return None
    _, rows, columns = example.img_shapes[0]
    return example.mask.float().reshape(rows, columns).numpy()


def _mask_picture(example: EncodedExample) -> Image.Image | None:
    """The edited region in white, at the size of the target."""
    mask = _mask(example)
    if mask is None:
        return None
    small = Image.fromarray((255 * mask).round().astype(np.uint8))
    return small.resize((16 * small.width, 16 * small.height), Image.Resampling.NEAREST).convert("RGB")


def drifts(edits: Sequence[DrawnEdit]) -> Iterator[dict[str, Any]]:
    """How far each edit has drifted, for the log."""
    for edit in edits:
        if edit.drift is not None:
            yield {
                "name": edit.name,
                "down": round(edit.drift.down, 4),
                "right": round(edit.drift.right, 4),
                "zoom": edit.drift.zoom,
                "confidence": round(edit.drift.confidence, 3),
            }
