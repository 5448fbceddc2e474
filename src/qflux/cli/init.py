"""`qflux init`: a commented config for somebody's data."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from qflux.cli.terminal import expanded, progress_bar, say, stages
from qflux.errors import ConfigError, DataError

MODELS = {
    "flux-kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "qwen-image": "Qwen/Qwen-Image",
    "qwen-image-edit": "Qwen/Qwen-Image-Edit",
    "qwen-image-edit-plus": "Qwen/Qwen-Image-Edit-2509",
}
SIDES = (128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Of squares whose areas are candidates."""


def init(
    data: Annotated[Path, typer.Argument(help="The folder or the table of your data.", show_default=False)],
    family: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "flux-kontext",
    model: Annotated[str | None, typer.Option(help="A folder or a hub id. Default: the family's own.")] = None,
    output: Annotated[Path, typer.Option(help="The config to write.")] = Path("qflux.yaml"),
    prompt: Annotated[str | None, typer.Option(help="For pairs of images that have no text.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing config.")] = False,
) -> None:
    """Look at your data and write a commented config for them.

    qflux init my_data
    qflux init my_data/pairs.csv --family qwen-image-edit --output edits.yaml
    """
    from qflux.data.discover import discover  # noqa: PLC0415
    from qflux.data.store import write_bytes  # noqa: PLC0415

    if family not in MODELS:
        raise ConfigError(f"--family {family} is not known", f"use one of {', '.join(MODELS)}.")
    output, data = expanded(output), expanded(data)
    if output.exists() and not force:
        raise ConfigError(f"{output} is there already", "choose another --output, or --force.")
    found = discover(data, prompt)
    source = dict(found.source)
    table = output.with_suffix(".jsonl")
    if found.rows:
        if table.exists() and not force:
            raise ConfigError(f"{table} is there already", "choose another --output, or --force.")
        write_bytes(table, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows).encode())
        source |= {"path": str(table), "root": str(data)}
        say(f"{len(found.rows)} pairs: {table}")
    seen = _look(family, source)
    name = re.sub(r"[^\w.-]+", "-", output.stem).lstrip(".-") or "run"
    text = _config(family, model or MODELS[family], name if name != "cache" else "run", source, seen, output)
    write_bytes(output, text.encode())
    say(f"{found.kind}: {seen['samples']} samples, {seen['sizes']}")
    say(f"{output}\n→ qflux check {output}")


def _look(family: str, source: dict[str, Any]) -> dict[str, Any]:
    """Sizes, controls and masks of the data, from their headers."""
    from tempfile import TemporaryDirectory  # noqa: PLC0415

    from qflux.config import load_config  # noqa: PLC0415
    from qflux.data.index import FileIndex  # noqa: PLC0415
    from qflux.data.samples import gather  # noqa: PLC0415
    from qflux.models import get_family  # noqa: PLC0415

    logging.getLogger("qflux").setLevel(logging.ERROR)
    values = {"family": family, "model": {"pretrained": "-"}, "data": {"sources": [source], "on_bad_sample": "skip"}}
    with TemporaryDirectory() as folder, progress_bar() as bar:
        listener = stages(bar)
        index = FileIndex(Path(folder) / "index.jsonl")
        gathered = gather(
            load_config(values).data, get_family(family), index, lambda done, total: listener("headers", done, total)
        )
    if not gathered.all:
        problems = "".join(f"\n  - {fault}" for fault in gathered.faults[:10])
        raise DataError(f"no sample of {source['path']} can be used by {family}:{problems}", "mend them first.")
    sides = sorted(math.sqrt(s.facts[0].width * s.facts[0].height) for s in gathered.all)
    widths, heights = (sorted(getattr(s.facts[0], side) for s in gathered.all) for side in ("width", "height"))
    return {
        "samples": len(gathered.all),
        "faults": [str(fault) for fault in gathered.faults],
        "sides": sides,
        "sizes": f"{widths[0]}x{heights[0]} to {widths[-1]}x{heights[-1]}",
        "masks": sum(bool(s.example.mask) for s in gathered.all),
        "controls": sorted({len(s.example.controls) for s in gathered.all}),
    }


def _areas(sides: list[float]) -> list[str]:
    """Candidate squares between the small and the large images; none much larger than any image."""
    low, high = sides[len(sides) // 20], sides[-1 - len(sides) // 20]
    chosen = [side for side in SIDES if 0.85 * low <= side <= 1.1 * high]
    if not chosen:
        nearest = min(SIDES, key=lambda side: abs(side - high)) if high >= SIDES[0] else max(64, round(high / 16) * 16)
        chosen = [nearest]
    while len(chosen) > 4:
        chosen = chosen[::2] if chosen[::2][-1] == chosen[-1] else [*chosen[::2], chosen[-1]]
    return [f"{side}*{side}" for side in chosen]


def _config(family: str, model: str, name: str, source: dict[str, Any], seen: dict[str, Any], file: Path) -> str:
    """The YAML, with a word about everything."""
    count, batch = seen["samples"], min(4, seen["samples"])
    steps = min(4000, max(500, 100 * -(-count // batch)))
    held_out = max(1, min(8, count // 10)) if count >= 10 else 0
    qwen = family != "flux-kontext"
    areas = ", ".join(f'"{area}"' for area in _areas(seen["sides"]))
    listed = yaml.safe_dump([source], sort_keys=False, allow_unicode=True).rstrip().replace("\n", "\n    ")
    controls = " or ".join(map(str, seen["controls"]))
    hold = f"held_out: {{ count: {held_out} }} # never train; their loss and edits are logged at every checkpoint"
    mask = f"{seen['masks']} of {count} samples have a mask"
    lines = [
        f"# Written by `qflux init` for {source['path']}:",
        f"# {count} samples, {seen['sizes']}, {controls} control images each.",
        "# Every key is explained in docs/reference.md.",
        "#",
        f"#   qflux check {file}          what would go wrong",
        f"#   qflux cache --config {file}     encode images and prompts once",
        f"#   qflux fit --config {file}       train; run it again to go on after an interruption",
        "",
        f"family: {family}",
        "output_dir: runs",
        f"run_name: {name} # everything goes to runs/{name}/",
        "",
        "model:",
        f"  pretrained: {json.dumps(model)} # a hub id, or a folder in diffusers format",
        "  dtype: bfloat16",
        "  # quantization: fp8 # or int8, nf4: the frozen weights take half or a quarter of the memory",
        "",
        "data:",
        "  sources:",
        f"    {listed}",
        f"  batch_size: {batch} # samples of any sizes; or max_tokens: as many as fit into so many tokens",
        f"  {hold}" if held_out else "  # held_out: { count: 2 } # samples that never train and validate the run",
        *([f"  on_bad_sample: skip # {len(seen['faults'])} samples can't be used"] if seen["faults"] else []),
        "  processor:",
        "    # Each image takes the nearest of these areas, at its own aspect ratio.",
        f"    multi_resolutions: [{areas}]",
        "",
        "lora:",
        "  rank: 16",
        "  alpha: 16 # strength is alpha / rank",
        "",
        "optimizer:",
        "  class_path: torch.optim.AdamW",
        "  init_args: { lr: 1e-4, weight_decay: 1e-4 }",
        "",
        "train:",
        f"  max_train_steps: {steps} # about {steps * batch // count} visits of each sample",
        "  lr_scheduler: constant_with_warmup",
        "  lr_warmup_steps: 50",
        "  gradient_checkpointing: true # less memory, a third more time",
        "  compile: true # once, then for all sizes",
        "  checkpoint_every: 250",
        "",
        "loss:",
        f"  use_mask_loss: {str(bool(seen['masks'])).lower()} # {mask}",
        "",
        "predict:",
        f"  num_inference_steps: {50 if qwen else 28}",
        *(['  negative_prompt: " " # switches true CFG on'] if qwen else ["  guidance_scale: 3.5"]),
        "",
    ]
    return "\n".join(lines)
