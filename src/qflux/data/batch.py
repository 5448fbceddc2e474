"""One micro-batch: encoded samples with their noise and timestep, as packed tokens.

Shapes: B samples; M target, K control and N = M + K image tokens of the whole batch; C channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.data.encoded import EncodedSample, TextEmbedding
from qflux.data.sample import Sample
from qflux.ragged.interleave import Interleave
from qflux.ragged.shapes import Shapes
from qflux.ragged.transfer import upload


@dataclass(frozen=True)
class NoisySample:
    """A sample on one of its visits: embeddings, noise level, noise, and its weight in the loss of the step."""

    sample: Sample
    encoded: EncodedSample
    sigma: float
    noise: Tensor
    """`(m, C)`"""
    weight: float = 1.0


@dataclass(frozen=True)
class Batch:
    """Samples of any sizes and control counts."""

    samples: tuple[Sample, ...]
    shapes: tuple[Shapes, ...]
    """Of what each sample shows: dropout may have taken its controls away."""
    text: tuple[TextEmbedding, ...]
    targets: Tensor
    """`(M, C)` clean target tokens."""
    controls: Tensor
    """`(K, C)` control tokens."""
    noise: Tensor
    """`(M, C)`"""
    sigma: Tensor
    """`(B,)` noise levels in [0, 1]."""
    mask: Tensor
    """`(M,)` 1 where a token is edited; a sample without a mask is edited everywhere."""
    weight: Tensor
    """`(B,)` of each sample's term in the loss of the step."""
    images: Interleave
    """Targets and controls as two streams and as the images of each sample."""
    counts: bool = True
    """False for a stand-in, which only keeps this rank in step with the others."""

    @classmethod
    def collate(
        cls, items: Sequence[NoisySample], device: torch.device | str, dtype: torch.dtype, counts: bool = True
    ) -> Batch:
        """Concatenate samples; nothing of a sample depends on the others."""
        encoded = [item.encoded for item in items]
        controls = [tokens for sample in encoded for tokens in sample.controls]
        masks = [torch.ones(len(s.target)) if s.mask is None else s.mask for s in encoded]
        sigma, weight = [item.sigma for item in items], [item.weight for item in items]
        return cls(
            samples=tuple(item.sample for item in items),
            shapes=tuple(sample.shapes for sample in encoded),
            text=tuple(sample.text.to(device, dtype) for sample in encoded),
            targets=upload(torch.cat([sample.target for sample in encoded]).float(), device),
            # A batch without any control still needs a tensor of their width.
            controls=upload(torch.cat(controls or [encoded[0].target[:0]]).float(), device),
            noise=upload(torch.cat([item.noise for item in items]).float(), device),
            sigma=upload(torch.tensor(sigma, dtype=torch.float32), device),
            mask=upload(torch.cat(masks).float(), device),
            weight=upload(torch.tensor(weight, dtype=torch.float32), device),
            images=Interleave.build(
                [sample.shapes.target_tokens for sample in encoded],
                [sample.shapes.control_tokens for sample in encoded],
                device,
            ),
            counts=counts,
        )

    def noisy_images(self) -> Tensor:
        """`(N, C)` image tokens in sample order: each target at its noise level, then its clean controls."""
        sigma = self.sigma[self.target_sample][:, None]
        return self.images.join((1 - sigma) * self.targets + sigma * self.noise, self.controls)

    def velocity(self) -> Tensor:
        """`(M, C)` what the model should predict: noise minus clean target."""
        return self.noise - self.targets

    @property
    def target_sample(self) -> Tensor:
        """`(M,)` the sample of each target token."""
        return self.images.first_sample

    @property
    def lengths(self) -> list[int]:
        """Text and image tokens of each sample."""
        return [len(text.tokens) + shapes.tokens for text, shapes in zip(self.text, self.shapes, strict=True)]

    @property
    def target_lengths(self) -> list[int]:
        return [shapes.target_tokens for shapes in self.shapes]
