"""One micro-batch: encoded samples with their noise and timestep, as packed tokens.

Shapes: B samples; M target, K control and N = M + K image tokens of the whole batch; C channels of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.data.encoded import EncodedExample, TextEmbedding
from qflux.ragged.interleave import Interleave
from qflux.ragged.shapes import ImageShape, image_tokens
from qflux.ragged.transfer import upload


@dataclass(frozen=True)
class EditBatch:
    """Samples of any sizes and control counts."""

    ids: tuple[str, ...]
    img_shapes: tuple[tuple[ImageShape, ...], ...]
    """Per sample: the target, then its controls."""
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

    @classmethod
    def collate(
        cls,
        examples: Sequence[EncodedExample],
        noise: Sequence[Tensor],
        sigma: Sequence[float],
        device: torch.device | str,
        dtype: torch.dtype,
        weight: Sequence[float] | None = None,
    ) -> EditBatch:
        """Concatenate samples; nothing of a sample depends on the others."""
        targets = [example.latents[0] for example in examples]
        controls = [latent for example in examples for latent in example.latents[1:]]
        masks = [torch.ones(e.target_tokens) if e.mask is None else e.mask for e in examples]
        return cls(
            ids=tuple(example.id for example in examples),
            img_shapes=tuple(example.img_shapes for example in examples),
            text=tuple(_moved(example.text, device, dtype) for example in examples),
            targets=upload(torch.cat(targets).float(), device),
            controls=upload(torch.cat(controls or [targets[0][:0]]).float(), device),
            noise=upload(torch.cat(list(noise)).float(), device),
            sigma=upload(torch.tensor(sigma, dtype=torch.float32), device),
            mask=upload(torch.cat(masks).float(), device),
            weight=upload(torch.tensor(weight or [1.0] * len(examples), dtype=torch.float32), device),
            images=Interleave.build(
                [example.target_tokens for example in examples],
                [image_tokens(example.img_shapes[1:]) for example in examples],
                device,
            ),
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
        return [
            len(text.tokens) + image_tokens(shapes) for text, shapes in zip(self.text, self.img_shapes, strict=True)
        ]

    @property
    def target_lengths(self) -> list[int]:
        return [image_tokens(shapes[:1]) for shapes in self.img_shapes]


def _moved(text: TextEmbedding, device: torch.device | str, dtype: torch.dtype) -> TextEmbedding:
    pooled = None if text.pooled is None else upload(text.pooled.to(dtype), device)
    return TextEmbedding(upload(text.tokens.to(dtype), device), pooled)
