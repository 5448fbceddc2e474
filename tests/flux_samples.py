"""Random FLUX samples, and what stock diffusers makes of each one alone: the reference of all parity tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch
from peft import LoraConfig
from torch import Tensor

from qflux.models import FluxTransformer2DModel, get_family
from qflux.ragged.layout import ImageShape, PackedLayout, PaddedLayout
from qflux.ragged.rope import image_ids

TEXT_WIDTH, POOLED_WIDTH, CHANNELS = 32, 24, 64


@dataclass(frozen=True)
class FluxSample:
    shapes: tuple[ImageShape, ...]
    image: Tensor
    text: Tensor
    pooled: Tensor
    sigma: Tensor
    upstream: Tensor
    """The gradient that arrives at this sample's output."""

    def to(self, dtype: torch.dtype) -> FluxSample:
        names = ("image", "text", "pooled", "sigma", "upstream")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


def random_sample(shapes: Sequence[tuple[int, int]], generator: torch.Generator, text_length: int = 7) -> FluxSample:
    tokens = sum(rows * columns for rows, columns in shapes)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    return FluxSample(
        shapes=tuple((1, rows, columns) for rows, columns in shapes),
        image=normal(tokens, CHANNELS),
        text=normal(text_length, TEXT_WIDTH),
        pooled=normal(POOLED_WIDTH),
        sigma=torch.rand((), generator=generator),
        upstream=normal(tokens, CHANNELS),
    )


def models_with_lora(seed: int = 0) -> tuple[FluxTransformer2DModel, diffusers.FluxTransformer2DModel]:
    """qflux's transformer and diffusers' own with the same weights and the same nonzero LoRA."""
    ours = get_family("flux-kontext").tiny(seed).transformer
    stock = diffusers.FluxTransformer2DModel.from_config(ours.config)
    stock.load_state_dict(ours.state_dict())
    for model in (ours, stock):
        model.train().requires_grad_(False)
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        torch.manual_seed(seed + 1)
        for parameter in lora_parameters(model):
            torch.nn.init.normal_(parameter, std=0.2)
    return ours, stock


def lora_parameters(model: Any) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def lora_gradient(model: Any, output: Tensor, upstream: Tensor) -> Tensor:
    """All LoRA gradients as one vector."""
    gradients = torch.autograd.grad(output, lora_parameters(model), upstream, retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def run_alone(stock: Any, sample: FluxSample) -> Tensor:
    """One sample through stock diffusers: `(tokens, channels)`."""
    return stock(
        hidden_states=sample.image[None],
        encoder_hidden_states=sample.text[None],
        pooled_projections=sample.pooled[None],
        timestep=sample.sigma[None],
        img_ids=image_ids([sample.shapes]),
        txt_ids=torch.zeros(len(sample.text), 3),
        guidance=torch.full((1,), 3.5),
        return_dict=False,
    )[0][0]


def run_packed(ours: Any, samples: Sequence[FluxSample], padded: bool = False) -> tuple[Tensor, ...]:
    """Samples as one ragged batch; one output per sample."""
    layout: Any = PackedLayout.from_shapes([len(s.text) for s in samples], [s.shapes for s in samples])
    if padded:
        layout = PaddedLayout.of(layout)
    output = ours(
        hidden_states=torch.cat([s.image for s in samples]),
        encoder_hidden_states=torch.cat([s.text for s in samples]),
        pooled_projections=torch.stack([s.pooled for s in samples]),
        timestep=torch.stack([s.sigma for s in samples]),
        img_ids=image_ids([s.shapes for s in samples]),
        txt_ids=torch.zeros(sum(len(s.text) for s in samples), 3),
        guidance=torch.full((len(samples),), 3.5),
        layout=layout,
        return_dict=False,
    )[0]
    return output.split([len(s.image) for s in samples])


@dataclass
class PaddedBatch:
    """Samples in the padded calling convention, with `fill` in every padding place."""

    image: Tensor
    text: Tensor
    img_ids: Tensor
    mask: Tensor

    @classmethod
    def of(cls, samples: Sequence[FluxSample], fill: float) -> PaddedBatch:
        count = len(samples)
        width, text_width = max(len(s.image) for s in samples), max(len(s.text) for s in samples)
        batch = cls(
            image=torch.full((count, width, CHANNELS), fill),
            text=torch.full((count, text_width, TEXT_WIDTH), fill),
            img_ids=torch.full((count, width, 3), fill),
            mask=torch.zeros(count, text_width + width, dtype=torch.bool),
        )
        for row, sample in enumerate(samples):
            batch.image[row, : len(sample.image)] = sample.image
            batch.text[row, : len(sample.text)] = sample.text
            batch.img_ids[row, : len(sample.image)] = image_ids([sample.shapes])
            batch.mask[row, : len(sample.text)] = True
            batch.mask[row, text_width : text_width + len(sample.image)] = True
        return batch

    def run(self, ours: Any, samples: Sequence[FluxSample], mask: Tensor | None) -> Tensor:
        return ours(
            hidden_states=self.image,
            encoder_hidden_states=self.text,
            pooled_projections=torch.stack([s.pooled for s in samples]),
            timestep=torch.stack([s.sigma for s in samples]),
            img_ids=self.img_ids,
            txt_ids=torch.zeros(self.text.shape[1], 3),
            guidance=torch.full((len(samples),), 3.5),
            attention_mask=mask,
            return_dict=False,
        )[0]
