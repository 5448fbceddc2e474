"""What a report says in words and numbers: summary, differences, data, configuration, environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import yaml

from qflux.models.registry import facts_of
from qflux.models.registry import names as registry_names
from qflux.ragged.shapes import PIXELS_PER_TOKEN
from qflux.report.charts import bars
from qflux.report.markup import Html, facts, join, table, tag
from qflux.report.values import at, flat, number, numbers
from qflux.runs.folder import RunFolder


def summary(runs: Sequence[RunFolder]) -> Html:
    columns = [_metrics_of(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return table(["", *(run.name for run in runs)] if len(runs) > 1 else (), rows)


def _metrics_of(run: RunFolder) -> dict[str, str]:
    """What there is to say about a run in numbers."""
    config, steps = run.config, run.steps
    found = {"state": run.status}
    if run.last_change:
        found["last step"] = run.last_change.strftime("%Y-%m-%d %H:%M")
    found |= {"family": str(config.get("family")), "model": str(at(config, "model.pretrained"))}
    if run.adapter:
        found["LoRA"] = str(run.adapter)
    if at(config, "train.method") != "full" and at(config, "lora.rank"):
        found["rank"] = f"{at(config, 'lora.rank')} ({at(config, 'lora.type')})"
    rate = at(config, "optimizer.init_args.lr")
    if rate is not None:
        found["learning rate"] = f"{rate} ({at(config, 'train.lr_scheduler')})"
    measured = [(line["step"], number(line["held_out_loss"])) for line in run.validations if "held_out_loss" in line]
    if measured:
        ends = ["NaN" if loss is None else f"{loss:.4f}" for _, loss in (measured[0], measured[-1])]
        found["held-out loss"] = " → ".join(ends)
        best = min(((loss, step) for step, loss in measured if loss is not None), default=None)
        found["best held-out loss"] = f"{best[0]:.4f} after step {best[1]}" if best else "–"
    if steps:
        tokens, seconds = sum(numbers(steps, "tokens")), sum(numbers(steps, "seconds"))
        padded = sum(
            n / (1 - share)
            for n, share in ((number(s.get("tokens")), number(s.get("padding_avoided"))) for s in steps)
            if n is not None and share is not None and share < 1
        )
        found["steps"] = f"{steps[-1]['step']} of {run.total_steps}"
        found["samples"] = str(run.coverage)
        found["tokens"] = f"{tokens:,.0f}"
        found["padding avoided"] = f"{1 - tokens / padded:.1%} of what a padded run would compute" if padded else "–"
        if speeds := numbers(steps, "tokens_per_second"):
            found["tokens per second"] = f"{median(speeds):,.0f}"
        found["time in steps"] = f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"
        waiting = sum(numbers(steps, "waiting_seconds"))
        found["of it waiting for data"] = f"{waiting / seconds:.1%}" if seconds else "–"
        if used := numbers(steps, "utilisation"):
            found["model-FLOP utilisation"] = f"{fmean(used):.1%}"
        if memory := numbers(steps, "peak_memory_gib"):
            found["peak memory"] = f"{max(memory):.1f} GiB"
        left_out = sum(bool(step.get("skipped")) for step in steps)
        if left_out:
            found["steps skipped"] = f"{left_out} (loss or gradient was NaN or infinite)"
    return found


def data_of(run: RunFolder) -> Html | None:
    """Sizes, controls and tokens of the training samples."""
    images = [found for sample in run.samples if (found := _sizes(sample.get("images")))]
    family = str(run.config.get("family"))
    pixels = facts_of(family).pixels_per_token if family in registry_names() else PIXELS_PER_TOKEN
    if not images:
        return None
    sizes = Counter(f"{own[0][0]} x {own[0][1]}" for own in images)
    controls = Counter(str(len(own) - 1) for own in images)
    tokens = sorted(sum(width * height // pixels**2 for width, height in own) for own in images)
    spread = {
        "samples": len(images),
        "image tokens, least": tokens[0],
        "median": int(median(tokens)),
        "most": tokens[-1],
    }
    skipped = [tag("li", reason) for reason in run.coverage.skipped[:50]]
    return tag(
        "div",
        facts({**spread, "coverage": run.coverage}),
        tag("h4", "Sizes of targets"),
        bars(sizes.most_common(16)),
        tag("h4", "Controls per sample"),
        bars(sorted(controls.items())),
        *([tag("h4", "Skipped"), tag("ul", *skipped)] if skipped else []),
        class_="data",
    )


def _sizes(value: Any) -> list[tuple[int, int]]:
    """Widths and heights of a sample's images, target first; nothing if they are damaged."""
    pairs = value if isinstance(value, list) else []
    whole = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)]
    return [(width, height) for width, height in whole] if len(whole) == len(pairs) else []


def configuration(runs: Sequence[RunFolder]) -> Html:
    """The effective configuration."""
    parts: list[Html] = []
    for run in runs:
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        parts.append(tag("details", tag("summary", run.name), tag("pre", text), open=None if len(runs) > 1 else ""))
    return join(parts)


def differences(runs: Sequence[RunFolder]) -> Html:
    """Settings that are not the same in all runs."""
    settings = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for values in settings for key in values if key != "run_name"))
    rows = [[k, *(str(v.get(k, "–")) for v in settings)] for k in keys if len({str(v.get(k)) for v in settings}) > 1]
    return table(["", *(run.name for run in runs)], rows) if rows else tag("p", "The settings are the same.")


def environment_of(run: RunFolder) -> Html | None:
    known = dict(flat(run.environment))
    return facts(known) if known else None
