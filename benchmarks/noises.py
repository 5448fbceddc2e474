"""Several noises of a sample at one visit: one text and its controls for all of them, against a copy of each.

    python benchmarks/noises.py                          # CUDA: Qwen-Image-2.1 with 7B weights; CPU: scaled down

Edits whose control is as large as the target, so that about half of a sample's tokens do not depend on the noise. K
noises of each sample, as one training step of a LoRA with compiled blocks: "shared" puts K targets behind one prefix,
"packed" runs K samples in one ragged batch, "one by one" accumulates over them, and "diffusers" does so in diffusers'
own forward, block by block compiled too. Weights are random: speed and memory do not depend on them.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import torch
from mixed_batch import FULL, SMALL, Scale, build_model, measure, set_execution
from torch import Tensor

from qflux.data.encoded import TextEmbedding
from qflux.models import get_family
from qflux.models.family import ModelInputs
from qflux.ragged.shapes import Shapes

BATCHES = {"one of 512 x 512": (1024,), "one of 1024 x 1024": (4096,), "four mixed": (1024, 1600, 2304, 4096)}
MODES = ("diffusers", "one by one", "packed", "shared")
TEXT, BEFORE = 60, 8
"""Text tokens of a sample, and those before its control."""


def inputs_of(scale: Scale, grids: Sequence[tuple[int, int, int]], noises: int, device: str) -> ModelInputs:
    """Samples with `noises` targets each behind one text and a control of the same size."""
    options: dict[str, Any] = {"device": device, "dtype": scale.dtype}
    shapes = [Shapes((grid,) * noises, (grid,)) for grid in grids]
    return ModelInputs(
        images=torch.randn(sum(sample.tokens for sample in shapes), 64, **options),
        shapes=shapes,
        text=[TextEmbedding(torch.randn(TEXT, scale.text_width, **options), places=(BEFORE,)) for _ in shapes],
        sigma=torch.rand(noises * len(shapes), device=device),
        guidance=1.0,
    )


def separate(inputs: ModelInputs) -> list[ModelInputs]:
    """The same noises as samples of their own."""
    alone, images, levels = [], iter(inputs.images.split([s.tokens for s in inputs.shapes])), iter(inputs.sigma)
    for shapes, text in zip(inputs.shapes, inputs.text, strict=True):
        targets, control = next(images).split([shapes.target_tokens, shapes.control_tokens])
        for target in targets.split(shapes.target_tokens // len(shapes.targets)):
            one = Shapes(shapes.targets[:1], shapes.controls)
            alone.append(ModelInputs(torch.cat([target, control]), [one], [text], next(levels)[None], 1.0))
    return alone


def together(parts: Sequence[ModelInputs]) -> ModelInputs:
    """Samples as one ragged batch."""
    return ModelInputs(
        torch.cat([part.images for part in parts]),
        [shapes for part in parts for shapes in part.shapes],
        [text for part in parts for text in part.text],
        torch.cat([part.sigma for part in parts]),
        1.0,
    )


def stock(model: Any, inputs: ModelInputs) -> Tensor:
    """diffusers' own forward of one sample: its prediction for the target."""
    (shapes,), (text,) = inputs.shapes, inputs.text
    target, control = inputs.images.split([shapes.target_tokens, shapes.control_tokens])
    slots = len(control) // 4
    holes = text.tokens.new_zeros(slots, text.tokens.shape[1])
    mask = [False] * BEFORE + [True] * slots + [False] * (TEXT - BEFORE) + [True] * (len(target) // 4)
    output = diffusers.QwenImage21Transformer2DModel.forward(
        model,
        torch.cat([control, target])[None],
        torch.cat([text.tokens[:BEFORE], holes, text.tokens[BEFORE:]])[None],
        inputs.sigma.to(target.dtype),
        [[*shapes.controls, *shapes.targets]],
        torch.tensor([mask], device=target.device),
        return_dict=False,
    )[0]
    return output[0, -len(target) :]


def training_step(model: Any, scale: Scale, inputs: ModelInputs, mode: str) -> Callable[[], None]:
    """A closure that does one optimizer step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    velocity = get_family(scale.family).velocity
    alone = separate(inputs)
    batches = {"shared": [inputs], "packed": [together(alone)]}.get(mode, alone)
    total = sum(shapes.target_tokens for shapes in inputs.shapes)

    def step() -> None:
        for batch in batches:
            if mode == "diffusers":
                predicted = [stock(model, batch)]
            else:
                rows = velocity(model, batch).split([shapes.tokens for shapes in batch.shapes])
                predicted = [row[: s.target_tokens] for row, s in zip(rows, batch.shapes, strict=True)]
            (torch.cat(predicted).float().square().sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noises", type=int, nargs="*", default=[4])
    parser.add_argument("--batches", nargs="*", default=list(BATCHES))
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = (FULL if device == "cuda" else SMALL)["qwen21"]
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{scale.name}, LoRA rank 16, {scale.dtype}, {machine}, torch {torch.__version__}, blocks recomputed\n")
    model = build_model(scale, device)
    set_execution(model, scale, compiled=device == "cuda", checkpointing=True)
    table = ["| batch | K | mode | s/step | noises/s | against packed | peak GiB |", "|---" * 7 + "|"]
    for name in arguments.batches:
        grids = [(1, n // 64, 64) if device == "cuda" else (1, max(2, n // 256), 8) for n in BATCHES[name]]
        for noises in arguments.noises:
            inputs, rates = inputs_of(scale, grids, noises, device), dict[str, float]()
            for mode in arguments.modes:
                seconds, gib = measure(training_step(model, scale, inputs, mode), scale, device, 2)
                rates[mode] = noises * len(grids) / seconds
                gain = f"{rates[mode] / rates['packed']:.2f}x" if "packed" in rates else ""
                table.append(f"| {name} | {noises} | {mode} | {seconds:.3f} | {rates[mode]:.2f} | {gain} | {gib:.1f} |")
                print(table[-1], flush=True)
                gc.collect()
    print()
    print("\n".join(table))


if __name__ == "__main__":
    main()
