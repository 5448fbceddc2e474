"""Random samples for every family, and what stock diffusers makes of each one alone: the reference of all parity tests.

A new family gets the whole contract of `parity/test_family_parity.py` and `integration/test_family_contract.py` by
adding a `Reference` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from numpy.typing import NDArray
from peft import LoraConfig
from PIL import Image
from torch import Tensor

from qflux.adapters.lora import add, containers
from qflux.data.encoded import TextEmbedding
from qflux.models import get_family
from qflux.models.family import ModelInputs
from qflux.models.flux2.positions import image_ids as flux2_ids
from qflux.models.flux2.positions import text_ids
from qflux.models.flux2.tiny import tiny_dev
from qflux.models.flux3.positions import control_ids, target_ids
from qflux.models.flux3.tiny import tiny as tiny_flux3
from qflux.models.flux_kontext.positions import image_ids
from qflux.models.qwen_image.tiny import tiny as tiny_qwen
from qflux.ragged.shapes import Shapes

POOLED_WIDTH, GUIDANCE = 24, 3.5
TEXT_WIDTH, CHANNELS = 64, 128
"""Samples are drawn wide enough for every family, and a family takes the channels that it has."""


@dataclass(frozen=True)
class Sample:
    shapes: Shapes
    image: Tensor
    text: Tensor
    pooled: Tensor
    sigma: Tensor
    upstream: Tensor
    """The gradient that arrives at this sample's output."""
    places: tuple[int, ...] = ()
    """Text tokens before each control, for families that have controls inside the text."""

    def to(self, dtype: torch.dtype) -> Sample:
        names = ("image", "text", "pooled", "sigma", "upstream")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


def random_sample(
    shapes: Sequence[tuple[int, int]], generator: torch.Generator, text_length: int = 7, unit: int = 1
) -> Sample:
    """Images of `shapes`, in units of so many tokens a side."""
    grids = [(1, unit * rows, unit * columns) for rows, columns in shapes]
    tokens = sum(rows * columns for _, rows, columns in grids)
    places = torch.randint(0, text_length + 1, (len(shapes) - 1,), generator=generator).sort().values

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    return Sample(
        shapes=Shapes(tuple(grids[:1]), tuple(grids[1:])),
        image=normal(tokens, CHANNELS),
        text=normal(text_length, TEXT_WIDTH),
        pooled=normal(POOLED_WIDTH),
        sigma=torch.rand((), generator=generator),
        upstream=normal(tokens, CHANNELS),
        places=tuple(places.tolist()),
    )


Case = Sequence[Sequence[tuple[int, int]]]
"""Per sample: rows and columns of the target, then of each control."""


def samples_of(case: Case, seed: int = 0, text: Sequence[int] | None = None, unit: int = 1) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    lengths = text or [7] * len(case)
    return [random_sample(shapes, generator, n, unit) for shapes, n in zip(case, lengths, strict=False)]


@dataclass
class PaddedBatch:
    """Samples in the padded calling convention, with `fill` in every padding place."""

    samples: Sequence[Sample]
    image: Tensor
    text: Tensor
    text_mask: Tensor
    image_mask: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], fill: float) -> PaddedBatch:
        count = len(samples)
        width, text_width = max(len(s.image) for s in samples), max(len(s.text) for s in samples)
        batch = cls(
            samples=samples,
            image=torch.full((count, width, CHANNELS), fill),
            text=torch.full((count, text_width, TEXT_WIDTH), fill),
            text_mask=torch.zeros(count, text_width, dtype=torch.bool),
            image_mask=torch.zeros(count, width, dtype=torch.bool),
        )
        for row, sample in enumerate(samples):
            batch.image[row, : len(sample.image)] = sample.image
            batch.text[row, : len(sample.text)] = sample.text
            batch.text_mask[row, : len(sample.text)] = True
            batch.image_mask[row, : len(sample.image)] = True
        return batch

    def ids(self, of_sample: Callable[[Sequence[Shapes]], Tensor]) -> Tensor:
        """Position ids of every sample, `of_sample` of a family; NaN in padding places."""
        found = [of_sample([sample.shapes]) for sample in self.samples]
        ids = torch.full((*self.image.shape[:2], found[0].shape[-1]), float("nan"))
        for row, own in enumerate(found):
            ids[row, : len(own)] = own
        return ids

    @property
    def mask(self) -> Tensor:
        return torch.cat([self.text_mask, self.image_mask], dim=1)

    def outputs(self, output: Tensor) -> list[Tensor]:
        """What was predicted for each sample."""
        return [row[: len(sample.image)] for row, sample in zip(output, self.samples, strict=True)]

    def is_padding(self, output: Tensor) -> Tensor:
        """`(B, …)` which rows of an output are no sample's."""
        return ~self.image_mask

    def first(self) -> PaddedBatch:
        parts = ("image", "text", "text_mask", "image_mask")
        return replace(self, samples=self.samples[:1], **{name: getattr(self, name)[:1] for name in parts})


@dataclass
class BatchInThree(PaddedBatch):
    """Targets and controls are padded apart: FLUX.3."""

    @classmethod
    def of(cls, samples: Sequence[Sample], fill: float) -> BatchInThree:
        batch = super().of(samples, fill)
        widths = [max(tokens) for tokens in zip(*map(_parts, samples), strict=True)]
        batch.image = torch.full((len(samples), sum(widths), CHANNELS), fill)
        batch.image_mask = torch.zeros(len(samples), sum(widths), dtype=torch.bool)
        for row, sample in enumerate(samples):
            parts = sample.image.split(_parts(sample))
            for start, part in zip((0, widths[0]), parts, strict=True):
                batch.image[row, start : start + len(part)] = part
                batch.image_mask[row, start : start + len(part)] = True
        return batch

    @property
    def widths(self) -> list[int]:
        targets = max(sample.shapes.target_tokens for sample in self.samples)
        return [targets, self.image.shape[1] - targets]

    def ids_of(self, column: int, of_sample: Callable[[Sequence[Shapes]], Tensor]) -> Tensor:
        """Position ids of targets or of controls, NaN in padding places."""
        found = [of_sample([sample.shapes]) for sample in self.samples]
        ids = torch.full((len(found), self.widths[column], found[0].shape[-1]), float("nan"))
        for row, own in enumerate(found):
            ids[row, : len(own)] = own
        return ids

    def outputs(self, output: Tensor) -> list[Tensor]:
        return [row[: _parts(sample)[0]] for row, sample in zip(output, self.samples, strict=True)]

    def is_padding(self, output: Tensor) -> Tensor:
        return ~self.image_mask[:, : self.widths[0]]


@dataclass
class BatchWithSlots(PaddedBatch):
    """Controls have places in the text, and the target comes last: Qwen-Image-2.1."""

    slots: Tensor | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], fill: float) -> BatchWithSlots:
        batch = super().of(samples, fill)
        alone = [_qwen21_alone(sample) for sample in samples]
        wide = max(one["encoder_hidden_states"].shape[1] for one in alone)
        batch.text = torch.full((len(samples), wide, TEXT_WIDTH), fill)
        batch.text_mask = torch.zeros(len(samples), wide, dtype=torch.bool)
        most = max(one["img_mask"].shape[1] - one["encoder_hidden_states"].shape[1] for one in alone)
        batch.slots = torch.zeros(len(samples), wide + most, dtype=torch.bool)
        for row, one in enumerate(alone):
            text, slots = one["encoder_hidden_states"][0], one["img_mask"][0]
            batch.text[row, : len(text)] = text
            batch.text_mask[row, : len(text)] = ~slots[: len(text)]
            batch.slots[row, : len(text)] = slots[: len(text)]
            batch.slots[row, wide : wide + len(slots) - len(text)] = True
            batch.image[row, : one["hidden_states"].shape[1]] = one["hidden_states"][0]
        return batch

    def first(self) -> BatchWithSlots:
        return replace(super().first(), slots=self.slots[:1])

    def outputs(self, output: Tensor) -> list[Tensor]:
        return [row[-_parts(sample)[0] :] for row, sample in zip(output, self.samples, strict=True)]

    def is_padding(self, output: Tensor) -> Tensor:
        counts = torch.tensor([_parts(sample)[0] for sample in self.samples])
        return torch.arange(output.shape[1])[None] < output.shape[1] - counts[:, None]


def _parts(sample: Sample) -> list[int]:
    return [sample.shapes.target_tokens, sample.shapes.control_tokens]


@dataclass(frozen=True)
class Reference:
    """What the contract needs to know about a family besides the `Family` itself."""

    family: str
    stock: Any
    """diffusers' own transformer class."""
    alone: Callable[[Any, Sample], dict[str, Any]]
    """Arguments for diffusers' forward on one sample."""
    padded: Callable[[Any], dict[str, Any]]
    """Arguments for qflux's forward in the padded convention, without masks."""
    draw: Callable[..., NDArray[np.float32]]
    """`draw(pipe, controls, **options)`: the pipeline's image, at exactly the size it is asked for."""
    control_counts: tuple[int, ...]
    """Of six edits that are drawn in one batch."""
    most_controls: int = 1
    """How many control images the pipeline takes at once."""
    text_width: int = 32
    channels: int = 64
    attention_kwargs: str = "attention_kwargs"
    """What diffusers calls the argument that holds a LoRA's scale."""
    tiny: Callable[[int], Any] | None = None
    """Builds all components, where they are not those of the family's own `tiny`."""
    pipeline: str | None = None
    """Of diffusers, where it is not the family's own."""
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    unit: int = 1
    """Sides of images are multiples of this many tokens."""
    targets_only: bool = False
    """Nothing is predicted for controls."""
    batch: type[PaddedBatch] = PaddedBatch
    """How samples are padded."""
    make: Callable[[str, dict[str, Any]], Any] = lambda name, parts: getattr(diffusers, name)(**parts)
    """The pipeline of this name from its parts."""

    def components(self, seed: int) -> Any:
        return (self.tiny or get_family(self.family).tiny)(seed)

    @property
    def pipeline_name(self) -> str:
        return self.pipeline or get_family(self.family).pipeline

    def fitted(self, sample: Sample) -> Sample:
        """A sample with as many channels as this family has."""
        image, upstream = (x[..., : self.channels].contiguous() for x in (sample.image, sample.upstream))
        return replace(sample, image=image, upstream=upstream, text=sample.text[..., : self.text_width].contiguous())


def _flux3_alone(sample: Sample) -> dict[str, Any]:
    targets, controls = sample.image.split([sample.shapes.target_tokens, sample.shapes.control_tokens])
    shown = {"image_cond_hidden_states": controls[None], "image_cond_ids": control_ids([sample.shapes])}
    return {
        "hidden_states": targets[None],
        "encoder_hidden_states": sample.text[None],
        "timestep": sample.sigma[None],
        "img_ids": target_ids([sample.shapes]),
        "txt_ids": text_ids([len(sample.text)]),
        **(shown if len(controls) else {}),
    }


def _flux3_padded(batch: BatchInThree) -> dict[str, Any]:
    targets, controls = batch.image.split(batch.widths, dim=1)
    return {
        "hidden_states": targets,
        "encoder_hidden_states": batch.text,
        "timestep": torch.stack([s.sigma for s in batch.samples]),
        "img_ids": batch.ids_of(0, target_ids),
        "txt_ids": text_ids([batch.text.shape[1]]),
        "image_cond_hidden_states": controls,
        "image_cond_ids": batch.ids_of(1, control_ids),
    }


def _flux3_distilled_padded(batch: BatchInThree) -> dict[str, Any]:
    arguments = _flux3_padded(batch)
    return {**arguments, "target_timestep": arguments["timestep"]}


def _flux3_distilled_alone(sample: Sample) -> dict[str, Any]:
    """In training a distilled model goes on to where it is."""
    return {**_flux3_alone(sample), "target_timestep": sample.sigma[None]}


class _TextProcessor:
    """What is used of the processor that the pipeline calls a tokenizer; the real one needs torchvision."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.apply_chat_template = tokenizer.apply_chat_template


def _flux3_pipeline(name: str, parts: dict[str, Any]) -> Any:
    """The modular pipeline without the model that rewrites prompts."""
    blocks = getattr(diffusers, name)().blocks
    blocks.sub_blocks.pop("prompt_upsampler")
    pipe = blocks.init_pipeline()
    pipe.update_components(**{**parts, "tokenizer": _TextProcessor(parts["tokenizer"])})
    pipe.register_modules = pipe.update_components
    return pipe


def _flux3_draw(pipe: Any, controls: Sequence[Image.Image], **options: Any) -> NDArray[np.float32]:
    scale, options["output"] = options.pop("true_cfg_scale"), "images"
    if hasattr(pipe, "guider"):
        pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=scale))
    elif options.pop("negative_prompt") is not None:
        pytest.skip("its pipeline has no true CFG")
    return pipe(**({"image": list(controls)} if controls else {}), **options)[0]


def _qwen21_alone(sample: Sample) -> dict[str, Any]:
    """Controls first, then the target; the text has places for all of them, of 2 x 2 tokens each."""
    shapes, text = sample.shapes, list(sample.text)
    targets, controls = sample.image.split([shapes.target_tokens, shapes.control_tokens])
    slots = [False] * len(text)
    for place, (_, rows, columns) in reversed(list(zip(sample.places, shapes.controls, strict=True))):
        count = rows * columns // 4
        slots[place:place] = [True] * count
        text[place:place] = [torch.full_like(sample.text[0], float("nan"))] * count
    slots += [True] * (len(targets) // 4)
    return {
        "hidden_states": torch.cat([controls, targets])[None],
        "encoder_hidden_states": torch.stack(text)[None],
        "timestep": sample.sigma[None],
        "img_shapes": [[*shapes.controls, *shapes.targets]],
        "img_mask": torch.tensor([slots]),
    }


def _qwen21_padded(batch: BatchWithSlots) -> dict[str, Any]:
    return {
        "hidden_states": batch.image,
        "encoder_hidden_states": batch.text,
        "timestep": torch.stack([s.sigma for s in batch.samples]),
        "img_shapes": [[*s.shapes.controls, *s.shapes.targets] for s in batch.samples],
        "img_mask": batch.slots,
    }


def _qwen21_draw(pipe: Any, controls: Sequence[Image.Image], **options: Any) -> NDArray[np.float32]:
    dimensions = pipeline_qwenimage21.calculate_dimensions
    area = options["height"] * options["width"]
    with patch.object(pipeline_qwenimage21, "calculate_dimensions", lambda _, ratio: dimensions(area, ratio)):
        return pipe(image=list(controls) or None, **options).images[0]


def _flux_alone(sample: Sample) -> dict[str, Any]:
    return {
        "hidden_states": sample.image[None],
        "encoder_hidden_states": sample.text[None],
        "pooled_projections": sample.pooled[None],
        "timestep": sample.sigma[None],
        "img_ids": image_ids([sample.shapes]),
        "txt_ids": torch.zeros(len(sample.text), 3),
        "guidance": torch.full((1,), GUIDANCE),
    }


def _flux_padded(batch: PaddedBatch) -> dict[str, Any]:
    return {
        "hidden_states": batch.image,
        "encoder_hidden_states": batch.text,
        "pooled_projections": torch.stack([s.pooled for s in batch.samples]),
        "timestep": torch.stack([s.sigma for s in batch.samples]),
        "img_ids": batch.ids(image_ids),
        "txt_ids": torch.zeros(batch.text.shape[1], 3),
        "guidance": torch.full((len(batch.samples),), GUIDANCE),
    }


def _flux2_alone(sample: Sample) -> dict[str, Any]:
    return {
        "hidden_states": sample.image[None],
        "encoder_hidden_states": sample.text[None],
        "timestep": sample.sigma[None],
        "img_ids": flux2_ids([sample.shapes]),
        "txt_ids": text_ids([len(sample.text)]),
        "guidance": torch.full((1,), GUIDANCE),
    }


def _flux2_padded(batch: PaddedBatch) -> dict[str, Any]:
    return {
        "hidden_states": batch.image,
        "encoder_hidden_states": batch.text,
        "timestep": torch.stack([s.sigma for s in batch.samples]),
        "img_ids": batch.ids(flux2_ids),
        "txt_ids": text_ids([batch.text.shape[1]]),
        "guidance": torch.full((len(batch.samples),), GUIDANCE),
    }


def _klein_draw(pipe: Any, controls: Sequence[Image.Image], **options: Any) -> NDArray[np.float32]:
    """Its guidance scale is that of true CFG, against the empty prompt unless somebody brings embeddings."""
    negative, scale = options.pop("negative_prompt"), options.pop("true_cfg_scale")
    against = {} if negative is None else {"negative_prompt_embeds": pipe.encode_prompt(negative)[0]}
    return pipe(image=list(controls) or None, guidance_scale=scale, **against, **options).images[0]


def _dev_draw(pipe: Any, controls: Sequence[Image.Image], **options: Any) -> NDArray[np.float32]:
    if options.pop("negative_prompt") is not None:
        pytest.skip("its pipeline has no true CFG")
    del options["true_cfg_scale"]
    return pipe(image=list(controls) or None, **options).images[0]


def _qwen_alone(sample: Sample) -> dict[str, Any]:
    return {
        "hidden_states": sample.image[None],
        "encoder_hidden_states": sample.text[None],
        "timestep": sample.sigma[None],
        "img_shapes": [list(sample.shapes.images)],
    }


def _qwen_padded(batch: PaddedBatch) -> dict[str, Any]:
    return {
        "hidden_states": batch.image,
        "encoder_hidden_states": batch.text,
        "timestep": torch.stack([s.sigma for s in batch.samples]),
        "img_shapes": [list(s.shapes.images) for s in batch.samples],
    }


def _flux_draw(pipe: Any, controls: Sequence[Image.Image], **options: Any) -> NDArray[np.float32]:
    size = options["height"] * options["width"]
    (image,) = controls
    return pipe(image=image, max_area=size, _auto_resize=False, guidance_scale=GUIDANCE, **options).images[0]


@contextmanager
def small_images(area: int) -> Iterator[None]:
    """Qwen's pipelines bring images to 1024 x 1024 pixels; a tiny model is compared at a tiny size."""
    dimensions = pipeline_qwenimage_edit.calculate_dimensions
    with (
        patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: dimensions(area, ratio)),
        patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", area),
    ):
        yield


def _qwen_draw(pipe: Any, controls: Sequence[Image.Image], **options: Any) -> NDArray[np.float32]:
    image = {"image": list(controls) if len(controls) > 1 else controls[0]} if controls else {}
    with small_images(options["height"] * options["width"]):
        return pipe(**image, **options).images[0]


def _qwen(family: str, controls: tuple[int, ...], most: int, tiny: Any = None) -> Reference:
    stock = diffusers.QwenImageTransformer2DModel
    return Reference(family, stock, _qwen_alone, _qwen_padded, _qwen_draw, controls, most, tiny=tiny)


def _flux2(draw: Any, **variant: Any) -> Reference:
    return Reference(
        "flux2",
        diffusers.Flux2Transformer2DModel,
        _flux2_alone,
        _flux2_padded,
        draw,
        (0, 1, 2, 4, 3, 1),
        most_controls=2,
        text_width=48,
        channels=128,
        attention_kwargs="joint_attention_kwargs",
        lora_targets=get_family("flux2").facts.lora_targets,
        **variant,
    )


def _flux3(alone: Any, padded: Any, **variant: Any) -> Reference:
    return Reference(
        "flux3",
        diffusers.Flux3Transformer2DModel,
        alone,
        padded,
        _flux3_draw,
        (0, 1, 2, 10, 3, 1),
        most_controls=2,
        text_width=64,
        channels=128,
        lora_targets=get_family("flux3").facts.lora_targets,
        targets_only=True,
        batch=BatchInThree,
        make=_flux3_pipeline,
        **variant,
    )


REFERENCES = {
    "flux-kontext": Reference(
        "flux-kontext",
        diffusers.FluxTransformer2DModel,
        _flux_alone,
        _flux_padded,
        _flux_draw,
        (1, 2, 0, 1, 3, 1),
        attention_kwargs="joint_attention_kwargs",
    ),
    "qwen-image": _qwen("qwen-image", (0,) * 6, 0),
    "qwen-image-edit": _qwen("qwen-image-edit", (1, 2, 1, 3, 1, 2), 1),
    "qwen-image-edit-plus": _qwen("qwen-image-edit-plus", (0, 1, 2, 4, 3, 1), 2),
    "qwen-image-edit-plus, 2511": _qwen(
        "qwen-image-edit-plus", (0, 1, 2, 4, 3, 1), 2, partial(tiny_qwen, zero_cond_t=True)
    ),
    "flux2": _flux2(_klein_draw),
    "flux2, dev": _flux2(_dev_draw, tiny=tiny_dev, pipeline="Flux2Pipeline"),
    "flux3": _flux3(_flux3_alone, _flux3_padded),
    "qwen-image-2.1": Reference(
        "qwen-image-2.1",
        diffusers.QwenImage21Transformer2DModel,
        _qwen21_alone,
        _qwen21_padded,
        _qwen21_draw,
        (0, 1, 2, 10, 3, 1),
        most_controls=2,
        unit=2,
        targets_only=True,
        batch=BatchWithSlots,
    ),
    "flux3, distilled": _flux3(
        _flux3_distilled_alone,
        _flux3_distilled_padded,
        tiny=partial(tiny_flux3, flow_map=True),
        pipeline="Flux3DistilledModularPipeline",
    ),
}
"""One for each family, and for each variant of it that runs another way."""
_ALIKE = ("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "flux2, dev", "flux3, distilled")


def _marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in _ALIKE else name for name in names]


KINDS = _marked(REFERENCES)
"""For tests of all of them. Those that share nearly all code with another are left to the complete tests."""


class Models:
    """qflux's transformer and diffusers' own with the same weights and the same nonzero LoRA."""

    def __init__(self, name: str, seed: int = 0, change: Callable[[Any], Any] | None = None) -> None:
        """`change` makes another description of the transformer from that of the tiny one."""
        self.reference = REFERENCES[name]
        self.family = get_family(self.reference.family)
        self.ours = self.reference.components(seed).transformer
        if change is not None:
            torch.manual_seed(seed)
            self.ours = type(self.ours).from_config(change(self.ours.config))
        self.stock = self.reference.stock.from_config(self.ours.config)
        self.stock.load_state_dict(self.ours.state_dict())
        targets = list(self.reference.lora_targets)
        for model in (self.ours, self.stock):
            model.train().requires_grad_(False)
            add(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets), exclude=containers(model, targets))
            torch.manual_seed(seed + 1)
            for parameter in lora_parameters(model):
                torch.nn.init.normal_(parameter, std=0.2)

    def to(self, dtype: torch.dtype) -> Models:
        self.ours.to(dtype)
        self.stock.to(dtype)
        return self

    def alone(self, sample: Sample) -> Tensor:
        """One sample through stock diffusers: `(tokens, channels)`."""
        output = self.stock(**self.reference.alone(self.reference.fitted(sample)), return_dict=False)[0][0]
        # Where it is one sequence, the target is the end of it.
        return output[-sample.shapes.target_tokens :] if self.reference.targets_only else output

    def samples(self, case: Case, seed: int = 0, text: Sequence[int] | None = None) -> list[Sample]:
        """Random samples with images of these shapes and texts of these lengths."""
        return samples_of(case, seed, text, self.reference.unit)

    def packed(self, samples: Sequence[Sample], padded: bool = False) -> tuple[Tensor, ...]:
        """Samples as one ragged batch, as training runs them; the targets of each, which is all that anybody reads."""
        samples = [self.reference.fitted(sample) for sample in samples]
        inputs = ModelInputs(
            images=torch.cat([s.image for s in samples]),
            shapes=[s.shapes for s in samples],
            text=[TextEmbedding(s.text, s.pooled, places=s.places) for s in samples],
            sigma=torch.stack([s.sigma for s in samples]),
            guidance=GUIDANCE,
            padded=padded,
        )
        outputs = self.family.velocity(self.ours, inputs).split([len(s.image) for s in samples])
        return tuple(output[: s.shapes.target_tokens] for output, s in zip(outputs, samples, strict=True))

    def batch(self, samples: Sequence[Sample], fill: float) -> Any:
        """Samples padded, with `fill` in every padding place."""
        return self.reference.batch.of(samples, fill)

    def padded(self, batch: PaddedBatch, **changes: Any) -> Tensor:
        """Samples in the padded calling convention: `(B, S, channels)`."""
        return self.ours(**{**self.arguments(batch), **changes}, return_dict=False)[0]

    def arguments(self, batch: PaddedBatch) -> dict[str, Any]:
        """Of the padded calling convention, without masks."""
        channels, text_width = self.reference.channels, self.reference.text_width
        image, text = batch.image[..., :channels].contiguous(), batch.text[..., :text_width].contiguous()
        return self.reference.padded(replace(batch, image=image, text=text))


def lora_parameters(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def lora_gradient(model: Any, output: Tensor, upstream: Tensor) -> Tensor:
    """All LoRA gradients as one vector."""
    upstream = upstream[: len(output), : output.shape[-1]] if output.ndim == 2 else upstream[..., : output.shape[-1]]
    gradients = torch.autograd.grad(
        output, lora_parameters(model), upstream, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([gradient.flatten() for gradient in gradients])
