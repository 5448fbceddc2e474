"""Six edits of different sizes: one ragged batch against six calls of diffusers' pipeline, in one run.

    python benchmarks/predict_batch.py           # CUDA: FLUX 12B, 28 steps; CPU: scaled down, 4 steps

Timed from control pixels to output pixels: VAE encoding, denoising, VAE decoding. Prompts are encoded beforehand in
both. Weights are random: speed does not depend on them. The edits have a control of their own size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline
from mixed_batch import FULL, SMALL, Scale, build_transformer, median_seconds
from torch import Tensor, nn

from qflux.data.encoded import TextEmbedding, TextLimit
from qflux.models import get_family
from qflux.models.flux_kontext.components import FluxKontextComponents
from qflux.models.precision import compute_in_eight_bits
from qflux.ragged.patches import pack
from qflux.ragged.shapes import Shapes, token_shape
from qflux.sampling.sampler import Prepared, Sampler

SIZES = ((512, 512), (512, 768), (768, 768), (1024, 768), (896, 1152), (1024, 1024))
"""(height, width)"""


class Edits:
    """Six edits on one transformer, for either side."""

    def __init__(self, scale: Scale, device: str, steps: int, divide: int) -> None:
        self.steps, self.device, self.dtype = steps, device, scale.dtype
        self.sizes = [(height // divide, width // divide) for height, width in SIZES]
        self.transformer = build_transformer(scale, device)
        self.scheduler = FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096
        )
        torch.manual_seed(0)
        channels = (128, 256, 512, 512) if device == "cuda" else (8, 8, 16, 16)
        self.vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=channels,
            layers_per_block=2,
            norm_num_groups=min(32, channels[0]),
            latent_channels=16,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ).to(device, scale.dtype)
        options: dict[str, Any] = {"device": device, "dtype": scale.dtype}
        self.text = [
            TextEmbedding(torch.randn(512 // divide, scale.text_width, **options), torch.randn(768, **options))
            for _ in self.sizes
        ]
        self.pixels = [torch.rand(3, *size, **options) * 2 - 1 for size in self.sizes]

    def round_to(self, precision: str) -> list[tuple[nn.Linear, type[nn.Linear], Tensor]]:
        """Let the transformer compute in 8 bits; what it was before."""
        blocks = get_family("flux-kontext").blocks(self.transformer)
        kept = [(m, type(m), m.weight) for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
        compute_in_eight_bits(blocks, precision)
        return kept

    def restore(self, kept: list[tuple[nn.Linear, type[nn.Linear], Tensor]]) -> None:
        for layer, cls, weight in kept:
            layer.__class__, layer.weight = cls, weight

    def one_by_one(self) -> Callable[[], list[Tensor]]:
        """diffusers' pipeline with diffusers' transformer, once per edit."""
        pipe = FluxKontextPipeline(self.scheduler, self.vae, None, None, None, None, self._as_stock())
        pipe.set_progress_bar_config(disable=True)

        def run() -> list[Tensor]:
            return [
                pipe(
                    image=(pixels[None] + 1) / 2,
                    prompt_embeds=text.tokens[None],
                    pooled_prompt_embeds=text.pooled[None] if text.pooled is not None else None,
                    height=height,
                    width=width,
                    max_area=height * width,
                    _auto_resize=False,
                    num_inference_steps=self.steps,
                    guidance_scale=3.5,
                    generator=torch.Generator().manual_seed(index),
                    output_type="pt",
                ).images[0]
                for index, (pixels, text, (height, width)) in enumerate(
                    zip(self.pixels, self.text, self.sizes, strict=True)
                )
            ]

        return run

    def _as_stock(self) -> Any:
        """The same weights in diffusers' own classes."""
        with torch.device("meta"):
            stock = diffusers.FluxTransformer2DModel.from_config(self.transformer.config)
        stock.load_state_dict(self.transformer.state_dict(), assign=True)
        return stock.eval()

    def together(self) -> Callable[[], list[Tensor]]:
        """One ragged batch."""
        family = get_family("flux-kontext")
        encoder = family.encoder(FluxKontextComponents(vae=self.vae), TextLimit(512))
        sampler = Sampler(family, self.transformer.eval(), self.scheduler)

        @torch.no_grad()
        def run() -> list[Tensor]:
            prepared = []
            for index, (pixels, text, size) in enumerate(zip(self.pixels, self.text, self.sizes, strict=True)):
                shape = token_shape(*size)
                noise = torch.randn(
                    16, 2 * shape[1], 2 * shape[2], generator=torch.Generator().manual_seed(index), dtype=self.dtype
                )
                control = encoder.encode_images([pixels])[0]
                prepared.append(Prepared(pack(noise).to(self.device), control, Shapes((shape,), (shape,)), text))
            latents = sampler(prepared, self.steps, 3.5, 1.0)
            return [encoder.decode_image(t, item.target) for t, item in zip(latents, prepared, strict=True)]

        return run


def psnr(one: Tensor, other: Tensor) -> float:
    """In decibels, of images in -1 to 1."""
    error = (one.float().clamp(-1, 1) - other.float().clamp(-1, 1)).square().mean()
    return float(10 * torch.log10(4 / error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precisions", nargs="*", default=["fp8", "int8"])
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = (FULL if device == "cuda" else SMALL)["flux"]
    edits = Edits(scale, device, 28 if device == "cuda" else 4, 1 if device == "cuda" else 4)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    sizes = ", ".join(f"{height}x{width}" for height, width in edits.sizes)
    print(f"{scale.name}, {scale.dtype}, {edits.steps} steps, {machine}, torch {torch.__version__}")
    print(f"edits: {sizes}; median of {arguments.repeats}\n", flush=True)
    print("| | seconds | against the pipeline |\n|---|---|---|", flush=True)
    stock, ours = edits.one_by_one(), edits.together()
    steps, edits.steps = edits.steps, 2  # a short run of each warms up, and shows that they make the same images
    with torch.no_grad():
        alone, batched = stock(), ours()
    edits.steps = steps
    apart = max(
        float(((a.float() * 2 - 1) - b.float().clamp(-1, 1)).abs().mean()) for a, b in zip(alone, batched, strict=True)
    )
    drawn: dict[str, list[Tensor]] = {}

    def keeping(name: str) -> Callable[[], None]:
        def work() -> None:
            drawn[name] = ours()

        return work

    baseline = median_seconds(stock, arguments.repeats, device)
    print(f"| six pipeline calls | {baseline:.2f} | 1.00x |", flush=True)
    together = median_seconds(keeping("full"), arguments.repeats, device)
    print(f"| one ragged batch | {together:.2f} | {together / baseline:.2f}x |", flush=True)
    for precision in arguments.precisions:
        kept = edits.round_to(precision)
        edits.steps = 2
        ours()  # its kernels
        edits.steps = steps
        rounded = median_seconds(keeping("rounded"), arguments.repeats, device)
        apart_by = [psnr(one, other) for one, other in zip(drawn["rounded"], drawn["full"], strict=True)]
        print(
            f"| one ragged batch, {precision} | {rounded:.2f} | {rounded / baseline:.2f}x | PSNR with the one before: "
            f"{min(apart_by):.1f} to {max(apart_by):.1f} dB",
            flush=True,
        )
        edits.restore(kept)
    print(f"\nmean difference of the images, of 2: {apart:.4f}")


if __name__ == "__main__":
    main()
