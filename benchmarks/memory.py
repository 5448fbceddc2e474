"""Peak memory of a LoRA step by the size and the number of its edits: what `qflux init` chooses its batches by.

    python benchmarks/memory.py                # FLUX 12B and Qwen-Image 20B, with random weights; needs a GPU of 80 GB

An edit is a target and one control of the same size, with 512 text tokens. Blocks recompute their activations and are
not compiled. The weights alone are 22.2 GiB (FLUX) and 38.1 GiB (Qwen) in bfloat16.
"""

from __future__ import annotations

import gc

import torch
from mixed_batch import FULL, Batch, build_model, measure, training_step

SIDES, COUNTS = (1024, 768, 512), (4, 2, 1)


def main() -> None:
    rows = []
    for scale in FULL.values():
        model = build_model(scale, "cuda")
        model.enable_gradient_checkpointing()
        for side in SIDES:
            for count in COUNTS:
                batch = Batch([(side // 16) ** 2] * count, [512] * count)
                seconds, peak = measure(training_step(model, scale, batch, "packed", "cuda"), scale, "cuda", 1)
                rows.append(f"| {scale.name} | {side} | {count} | {peak:.1f} GiB | {seconds:.2f} s |")
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print("| model | side | edits | peak memory | a step |\n|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
