"""What a checkpoint is worth: loss on held-out samples, and edits of some of them.

1. `HeldOutLoss`    the loss at noise and noise levels that never change, so that checkpoints can be compared
2. `HeldOutEdits`   edits of a few held-out samples of different sizes, as one ragged batch, and how far they drifted

Nothing but the cache and the VAE's decoder is needed. All ranks take part: a sharded model can't run on one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from qflux.data.images import to_image
from qflux.data.loader import read_ahead
from qflux.data.store import key_of, seed_of
from qflux.losses.mse import MseLoss
from qflux.losses.timesteps import NoiseLevels, NoiseShift
from qflux.models.family import Encoder
from qflux.ragged.transfer import upload
from qflux.sampling.drift import Drift, drift_between
from qflux.sampling.sampler import Prepared, Sampler
from qflux.training.distributed import World
from qflux.training.encode import TrainingSample
from qflux.training.feed import Provider, read_named
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
    """A held-out sample, edited."""

    name: str
    prompt: str
    output: Image.Image
    wanted: Image.Image
    control: Image.Image | None
    drift: Drift | None
    """Against the first control, outside the mask."""


class HeldOutEdits:
    """Edits of held-out samples. Of many, those are chosen that differ most in sizes and control counts."""

    def __init__(
        self,
        config: Config,
        samples: Sequence[TrainingSample],
        provider: Provider,
        encoder: Encoder,
        scheduler: Any,
        device: torch.device,
    ) -> None:
        self._config = config
        self._provider = provider
        self._encoder = encoder
        self._scheduler = scheduler
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._samples = _varied(samples, config.validation.images)

    def __call__(self, model: TrainedModel, steps: int | None = None, count: int | None = None) -> list[DrawnEdit]:
        """Draw them all (or `count`), as one batch; by default with the configured number of steps."""
        config, chosen = self._config, self._samples[:count]
        examples = [self._example(sample, WHOLE) for sample in chosen]
        prepared = [self._prepare(sample, example) for sample, example in zip(chosen, examples, strict=True)]
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
        return [self._drawn(*item) for item in zip(chosen, examples, latents, strict=True)]

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
        pictures = [self._decode(latents, example, 0)]
        pictures += [self._decode(example.latents[index], example, index) for index in range(len(example.latents))[:2]]
        output, wanted, *controls = pictures
        control = controls[0] if controls else None
        drift = None
        if control is not None and control.size == output.size:
            drift = drift_between(control, output, _mask(example))
        return DrawnEdit(sample.example.name, sample.example.prompt, output, wanted, control, drift)

    def _decode(self, latents: Tensor, example: EncodedExample, index: int) -> Image.Image:
        tokens = latents.to(self._device, self._dtype)
        with torch.no_grad():
            return to_image(self._encoder.decode_image(tokens, example.img_shapes[index]))


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
