"""One micro-batch: encoded samples with their noise and timestep, as packed tokens.

A sample is one sequence of tokens, unless several noises were drawn for it: then it is one text, its controls and
several noisy targets, or as many sequences as there are targets.

Shapes: B sequences, R noisy targets; M target, K control and N = M + K image tokens of the whole batch; C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qflux.data.encoded import EncodedSample, TextEmbedding
from qflux.data.sample import Sample
from qflux.ragged.interleave import Interleave
from qflux.ragged.shapes import Shapes, image_tokens
from qflux.ragged.transfer import upload


@dataclass(frozen=True)
class Draw:
    """A noise level, a noise, and the weight of what they make of a sample in the loss of the step."""

    sigma: float
    noise: Tensor
    """`(m, C)`"""
    weight: float = 1.0
    is_blank: bool = False
    """The visit is about what the model does without a prompt: it should do what it did before."""


@dataclass(frozen=True)
class NoisySample:
    """A sample on one of its visits: its embeddings, and what was drawn."""

    sample: Sample
    encoded: EncodedSample
    draws: tuple[Draw, ...]


@dataclass(frozen=True)
class Batch:
    """Samples of any sizes and control counts."""

    samples: tuple[Sample, ...]
    shapes: tuple[Shapes, ...]
    """Of what each sequence shows: dropout may have taken its controls away."""
    text: tuple[TextEmbedding, ...]
    """Of each sequence."""
    targets: Tensor
    """`(M, C)` clean target tokens."""
    controls: Tensor
    """`(K, C)` control tokens."""
    noise: Tensor
    """`(M, C)`"""
    sigma: Tensor
    """`(R,)` noise levels in [0, 1]."""
    target: Tensor
    """`(M,)` which noisy target a token is of."""
    mask: Tensor
    """`(M,)` 1 where a token is edited; a sample without a mask is edited everywhere."""
    weight: Tensor
    """`(R,)` of each term in the loss of the step."""
    blank: Tensor | None
    """`(R,)` true for noisy targets whose prompt was left away to see that nothing changes; none if there are none."""
    images: Interleave
    """Targets and controls as two streams and as the images of each sequence."""
    counts: bool = True
    """False for a stand-in, which only keeps this rank in step with the others."""

    @classmethod
    def collate(
        cls,
        items: Sequence[NoisySample],
        device: torch.device | str,
        dtype: torch.dtype,
        counts: bool = True,
        shares_prefix: bool = False,
    ) -> Batch:
        """Concatenate samples; nothing of a sample depends on the others.

        With `shares_prefix`, all noisy targets of a sample stand behind one text and its controls.
        """
        sequences = [
            (item.encoded, draws)
            for item in items
            for draws in ([item.draws] if shares_prefix else [(draw,) for draw in item.draws])
        ]
        shapes = [Shapes(encoded.shapes.targets * len(draws), encoded.shapes.controls) for encoded, draws in sequences]
        controls = [tokens for encoded, _ in sequences for tokens in encoded.controls]
        drawn = [(encoded, draw) for encoded, draws in sequences for draw in draws]
        masks = [torch.ones(len(s.target)) if s.mask is None else s.mask for s, _ in drawn]
        sigma, weight = [draw.sigma for _, draw in drawn], [draw.weight for _, draw in drawn]
        lengths = torch.tensor([len(encoded.target) for encoded, _ in drawn])
        blank = [draw.is_blank for _, draw in drawn]
        return cls(
            samples=tuple(item.sample for item in items),
            shapes=tuple(shapes),
            text=tuple(encoded.text.to(device, dtype) for encoded, _ in sequences),
            targets=upload(torch.cat([encoded.target for encoded, _ in drawn]).float(), device),
            # A batch without any control still needs a tensor of their width.
            controls=upload(torch.cat(controls or [items[0].encoded.target[:0]]).float(), device),
            noise=upload(torch.cat([draw.noise for _, draw in drawn]).float(), device),
            sigma=upload(torch.tensor(sigma, dtype=torch.float32), device),
            target=upload(torch.arange(len(drawn)).repeat_interleave(lengths), device),
            mask=upload(torch.cat(masks).float(), device),
            weight=upload(torch.tensor(weight, dtype=torch.float32), device),
            blank=upload(torch.tensor(blank), device) if any(blank) else None,
            images=Interleave.build(
                [sample.target_tokens for sample in shapes], [sample.control_tokens for sample in shapes], device
            ),
            counts=counts,
        )

    def noisy_images(self) -> Tensor:
        """`(N, C)` image tokens in order: targets at their noise levels, then the clean controls of their sequence."""
        sigma = self.sigma[self.target][:, None]
        return self.images.join((1 - sigma) * self.targets + sigma * self.noise, self.controls)

    def velocity(self) -> Tensor:
        """`(M, C)` what the model should predict: noise minus clean target."""
        return self.noise - self.targets

    def per_sample(self, count: Callable[[int, Shapes], int]) -> list[int]:
        """What `count` says of the text tokens and shapes of each sequence, summed over those of each sample."""
        of_sequences = [count(len(text.tokens), shapes) for text, shapes in zip(self.text, self.shapes, strict=True)]
        copies = len(of_sequences) // len(self.samples)
        return [sum(of_sequences[first : first + copies]) for first in range(0, len(of_sequences), copies)]

    @property
    def lengths(self) -> list[int]:
        """Text and image tokens of each sample."""
        return self.per_sample(lambda text, shapes: text + shapes.tokens)

    @property
    def target_lengths(self) -> list[int]:
        """Tokens of each noisy target."""
        return [image_tokens([target]) for shapes in self.shapes for target in shapes.targets]
