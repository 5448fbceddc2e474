"""Latents as tokens and back: one token is a 2 × 2 patch of the latent, 16 × 16 pixels of the image."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from qflux.ragged.shapes import ImageShape


def pack(latents: Tensor) -> Tensor:
    """Latents `(C, 2 h, 2 w)` as tokens `(h * w, 4 C)`."""
    return rearrange(latents, "c (h p) (w q) -> (h w) (c p q)", p=2, q=2)


def unpack(tokens: Tensor, shape: ImageShape) -> Tensor:
    """Tokens `(h * w, 4 C)` as latents `(C, 2 h, 2 w)`."""
    _, rows, columns = shape
    return rearrange(tokens, "(h w) (c p q) -> c (h p) (w q)", h=rows, w=columns, p=2, q=2)


def patch_noise(channels: int, shape: ImageShape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Noise tokens `(h * w, channels)`, drawn as diffusers' pipelines draw the latents `(channels / 4, 2 h, 2 w)`."""
    _, rows, columns = shape
    return pack(torch.randn(channels // 4, 2 * rows, 2 * columns, generator=generator, dtype=dtype))


def mask_to_tokens(mask: Tensor, pixels: int = 16) -> Tensor:
    """A pixel mask `(B, H, W)` in [0, 1] as one value per token of `pixels` × `pixels`.

    A cell is the mean of 8 × 8 pixels, a token the maximum of its cells (2 × 2 of them in most models).
    """
    cells, side = rearrange(mask, "b (h p) (w q) -> b h w (p q)", p=8, q=8).mean(-1), pixels // 8
    return rearrange(cells, "b (h p) (w q) -> b (h w) (p q)", p=side, q=side).amax(-1)
