"""The config that is written for somebody's data, with a word about everything."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qflux.config.reader import FLOAT
from qflux.models.facts import Facts
from qflux.models.registry import shipped
from qflux.start.look import Seen
from qflux.start.machine import Machine
from qflux.start.presets import Model, Preset

SIDES = (128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Of squares whose areas are candidates."""
HEAD, OPTIONS = "# Written by qflux for ", "# with: "


@dataclass(frozen=True)
class Plan:
    """Everything a config is written from."""

    data: Path
    source: dict[str, Any]
    seen: Seen
    model: Model
    machine: Machine
    preset: Preset
    run_name: str
    options: dict[str, Any] = field(default_factory=dict)
    """What somebody has said besides where the data are."""


class _Dumper(yaml.SafeDumper):
    """Quotes what the reader of configs would take for a number: `1e3` may be the name of a folder."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789"))


def config_text(plan: Plan, file: Path) -> str:
    """The YAML."""
    return "\n".join([*_head(plan, file), *_model(plan), *_data(plan), *_training(plan), *_rest(plan), ""])


def written_for(file: Path) -> tuple[str, dict[str, Any]] | None:
    """The data that a config was written for, and the options that were given, if it was written here."""
    try:
        with file.open(encoding="utf-8") as opened:
            first, second = opened.readline().removesuffix("\n"), opened.readline()
        options = json.loads(second.removeprefix(OPTIONS)) if second.startswith(OPTIONS) else {}
    except (OSError, ValueError):
        return None
    if not first.startswith(HEAD) or not isinstance(options, dict):
        return None
    return first.removeprefix(HEAD).removesuffix(":"), options


def shown_data(data: Path) -> str:
    """Where data are, as a config's first line names them."""
    return _one_line(str(data.resolve()))


def _head(plan: Plan, file: Path) -> list[str]:
    shown = _one_line(shlex.quote(str(file)))
    return [
        f"{HEAD}{shown_data(plan.data)}:",
        *([f"{OPTIONS}{json.dumps(plan.options)}"] if plan.options else []),
        f"# {plan.seen}; to be trained on {_one_line(str(plan.machine))}.",
        "# Every key is explained in docs/reference.md.",
        "#",
        f"#   qflux train {shown}     all of the following; run it again to go on after an interruption",
        "#",
        f"#   qflux check {shown}     what would go wrong",
        f"#   qflux cache {shown}     encode images and prompts once",
        f"#   qflux fit {shown}       train",
        f"#   qflux report {shown}    look at it",
        "",
    ]


def _model(plan: Plan) -> list[str]:
    model, preset = plan.model, plan.preset
    about = "a hub id, or a folder in diffusers format"
    if model.is_small:
        about = f"the small model that ships with qflux; on a GPU: {model.facts.hub_id}"
    precision = "  # precision: auto # 8-bit arithmetic with frozen weights: half of their memory, and faster"
    memory = "# memory: 12GB # what a run may take of the GPU; default: what is free"
    return [
        f"family: {model.family}",
        "output_dir: runs # from the folder in which the command is started, like all paths here",
        f"run_name: {json.dumps(plan.run_name)} # everything goes to the folder of this name in runs/",
        *([] if model.is_small else [memory]),
        "",
        "model:",
        f"  pretrained: {json.dumps(model.pretrained, ensure_ascii=False)} # {about}",
        f"  dtype: {preset.dtype}",
        *([] if model.is_small else [precision]),
        *([f"  max_sequence_length: {shipped().text_tokens}", "  on_long_prompt: truncate"] if model.is_small else []),
        "",
    ]


def _data(plan: Plan) -> list[str]:
    seen, preset = plan.seen, plan.preset
    count = len(seen.samples)
    held_out = max(1, min(8, count // 10)) if count >= 10 else 0
    hold = f"held_out: {{ count: {held_out} }} # never train; their loss and edits are logged at every checkpoint"
    text = yaml.dump([plan.source], Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    listed = text.rstrip().replace("\n", "\n    ")
    areas = ", ".join(f'"{side}*{side}"' for side in candidates(seen.sides, preset.largest_side))
    return [
        "data:",
        "  sources:",
        f"    {listed}",
        f"  batch_size: {preset.batch_size} # samples of any sizes; or max_tokens: as many as fit into so many tokens",
        f"  {hold}" if held_out else "  # held_out: { count: 2 } # samples that never train and validate the run",
        *([f"  on_bad_sample: skip # {len(seen.faults)} samples can't be used"] if seen.faults else []),
        "  processor:",
        "    # Each image takes the nearest of these areas, at its own aspect ratio.",
        f"    multi_resolutions: [{areas}]",
        "    enlarge: false # an image that is smaller keeps its own pixels",
        "",
    ]


def candidates(sides: list[float], largest: int) -> list[int]:
    """Squares between the small and the large images; none much larger than any image, and none beyond `largest`."""
    low, high = (min(side, largest) for side in (sides[len(sides) // 20], sides[-1 - len(sides) // 20]))
    chosen = [side for side in SIDES if 0.85 * low <= side <= min(1.1 * high, largest)]
    if not chosen:
        nearest = min(SIDES, key=lambda side: abs(side - high)) if high >= SIDES[0] else max(64, round(high / 16) * 16)
        chosen = [min(nearest, largest)]
    while len(chosen) > 4:
        chosen = chosen[::2] if chosen[::2][-1] == chosen[-1] else [*chosen[::2], chosen[-1]]
    return chosen


def _training(plan: Plan) -> list[str]:
    preset, small = plan.preset, plan.model.is_small
    visits = preset.steps * preset.batch_size // len(plan.seen.samples)
    warmup, rate = (30, shipped().learning_rate) if small else (50, "1e-4")
    return [
        "lora:",
        "  rank: 16",
        "  alpha: 16 # strength is alpha / rank",
        *([f"  target_modules: [{', '.join(shipped().lora_targets)}]"] if small else []),
        "",
        "optimizer:",
        "  class_path: torch.optim.AdamW",
        f"  init_args: {{ lr: {rate}, weight_decay: {0.0 if small else '1e-4'} }}",
        "",
        "train:",
        f"  max_train_steps: {preset.steps} # about {visits} visits of each sample",
        f"  lr_scheduler: {'cosine' if small else 'constant_with_warmup'}",
        f"  lr_warmup_steps: {warmup}",
        f"  gradient_checkpointing: {_auto(preset.gradient_checkpointing)} # true: less memory, more time",
        f"  compile: {_auto(preset.compile)} # a minute once, then faster steps on a GPU",
        f"  checkpoint_every: {80 if small else 250}",
        "",
    ]


def _auto(wanted: bool) -> str:
    """What a run may decide for itself."""
    return "auto" if wanted else "false"


def _rest(plan: Plan) -> list[str]:
    facts, small, seen = plan.model.facts, plan.model.is_small, plan.seen
    steps = 8 if small else facts.num_inference_steps
    return [
        "loss:",
        f"  kind: {'mask' if seen.masks else 'mse'} # {seen.masks} of {len(seen.samples)} samples have a mask",
        "",
        "validation:",
        "  images: 4 # held-out edits that are drawn at every checkpoint",
        *(["  num_inference_steps: 8"] if small else []),
        "  # edits: # your own, beside them or instead",
        "  #   - { prompt: make it snow, images: [photo.jpg] }",
        "",
        "predict:",
        f"  num_inference_steps: {steps}",
        *_guidance(facts),
    ]


def _guidance(facts: Facts) -> list[str]:
    if facts.true_cfg_scale > 1:
        negative = " " if facts.negative_prompt is None else facts.negative_prompt
        return [f'  negative_prompt: "{negative}" # switches true CFG on']
    return [] if facts.is_distilled else [f"  guidance_scale: {facts.guidance_scale:g}"]


def _one_line(text: str) -> str:
    """As it can stand in a comment."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
