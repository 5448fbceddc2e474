"""`qflux init`: a commented config for somebody's data."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
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
    from qflux.data.discover import TABLE, discover  # noqa: PLC0415
    from qflux.data.store import write_bytes  # noqa: PLC0415

    if family not in MODELS:
        raise ConfigError(f"--family {family} is not known", f"use one of {', '.join(MODELS)}.")
    output, data = expanded(output), expanded(data)
    if output.suffix.lower() not in (".yaml", ".yml") or not output.name.isprintable():
        raise ConfigError(f"--output {str(output)!r} is no name of a config", "give one that ends in .yaml.")
    table = output.with_name(f"{output.stem}{TABLE}")
    found = discover(data, prompt)
    written = [output, *([table] if found.rows else [])]
    for file in written:
        if file.is_dir() or (file.exists() and not force):
            raise ConfigError(f"{file} is there already", "choose another --output, or --force.")
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows).encode()
    source = dict(found.source)
    if found.rows:
        source |= {"path": str(table), "root": str(data)}
    seen = _look(family, source, rows)
    if found.rows:
        write_bytes(table, rows)
    name = re.sub(r"[^a-zA-Z0-9_.-]+", "-", output.stem).lstrip(".-") or "run"
    text = _config(family, model or MODELS[family], name if name != "cache" else "run", source, seen, output)
    write_bytes(output, text.encode())
    say(f"{found.kind}: {seen['samples']} samples, {seen['sizes']}, {seen['controls']} control images each")
    for line in [*found.notes, *(f"can't be used: {fault}" for fault in seen["faults"][:10])]:
        say(line)
    for file in written:
        say(str(file))
    say(f"→ qflux check {shlex.quote(str(output))}")


def _look(family: str, source: dict[str, Any], rows: bytes) -> dict[str, Any]:
    """Sizes, controls and masks of the data, from their headers. `rows` are of a table that is not written yet."""
    from tempfile import TemporaryDirectory  # noqa: PLC0415

    from qflux.config import load_config  # noqa: PLC0415
    from qflux.data.index import FileIndex  # noqa: PLC0415
    from qflux.data.samples import gather  # noqa: PLC0415
    from qflux.models import get_family  # noqa: PLC0415

    with TemporaryDirectory() as folder, progress_bar() as bar, _silent():
        looked = dict(source)
        if rows:
            looked |= {"path": f"{folder}/rows.jsonl", "root": str(Path(source["root"]).resolve())}
            Path(looked["path"]).write_bytes(rows)
        values = {
            "family": family,
            "model": {"pretrained": "-"},
            "data": {"sources": [looked], "on_bad_sample": "skip"},
        }
        listener = stages(bar)
        index = FileIndex(Path(folder) / "index.jsonl")
        gathered = gather(
            load_config(values).data, get_family(family), index, lambda done, total: listener("headers", done, total)
        )
    if not gathered.all:
        problems = "".join(f"\n  - {fault}" for fault in gathered.faults[:10]) or " it holds no row"
        remedies = dict.fromkeys(fault.remedy for fault in gathered.faults if fault.remedy)
        raise DataError(
            f"no sample of {source['path']} can be used by {family}:{problems}",
            " ".join(list(remedies)[:3]) or "mend them first.",
        )
    sides = sorted(math.sqrt(s.facts[0].width * s.facts[0].height) for s in gathered.all)
    widths, heights = (sorted(getattr(s.facts[0], side) for s in gathered.all) for side in ("width", "height"))
    return {
        "samples": len(gathered.all),
        "faults": [str(fault) for fault in gathered.faults],
        "sides": sides,
        "sizes": f"{widths[0]}x{heights[0]} to {widths[-1]}x{heights[-1]}",
        "masks": sum(bool(s.example.mask) for s in gathered.all),
        "controls": " or ".join(map(str, sorted({len(s.example.controls) for s in gathered.all}))),
    }


@contextmanager
def _silent() -> Iterator[None]:
    """What there is to warn of, `check` and `inspect` say."""
    logger = logging.getLogger("qflux")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


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
    shown = _one_line(shlex.quote(str(file)))
    count, batch = seen["samples"], min(4, seen["samples"])
    steps = min(4000, max(500, 100 * -(-count // batch)))
    held_out = max(1, min(8, count // 10)) if count >= 10 else 0
    qwen = family != "flux-kontext"
    areas = ", ".join(f'"{area}"' for area in _areas(seen["sides"]))
    listed = yaml.safe_dump([source], sort_keys=False, allow_unicode=True).rstrip().replace("\n", "\n    ")
    hold = f"held_out: {{ count: {held_out} }} # never train; their loss and edits are logged at every checkpoint"
    mask = f"{seen['masks']} of {count} samples have a mask"
    lines = [
        f"# Written by `qflux init` for {_one_line(source.get('root') or source['path'])}:",
        f"# {count} samples, {seen['sizes']}, {seen['controls']} control images each.",
        "# Every key is explained in docs/reference.md.",
        "#",
        f"#   qflux check {shown}          what would go wrong",
        f"#   qflux cache --config {shown}     encode images and prompts once",
        f"#   qflux fit --config {shown}       train; run it again to go on after an interruption",
        "",
        f"family: {family}",
        "output_dir: runs",
        f"run_name: {json.dumps(name)} # everything goes to runs/{name}/",
        "",
        "model:",
        f"  pretrained: {json.dumps(model, ensure_ascii=False)} # a hub id, or a folder in diffusers format",
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


def _one_line(text: str) -> str:
    """As it can stand in a comment."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
