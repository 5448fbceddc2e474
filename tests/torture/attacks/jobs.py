"""Lists of edits with something wrong: each bad job is named, and the others are made as ever."""

from __future__ import annotations

import csv
import io
import json

from torture.attacks.damage import odd_value, spoiled
from torture.cases import Case, Wrong
from torture.ground import pictures


def listed(case: Case) -> None:
    draw, ground, output = case.random, case.ground, case.folder / "edits"
    jobs = [json.loads(line) for line in ground.jobs.read_text().splitlines()]
    draw.shuffle(jobs)
    good = {job["name"] for job in jobs}
    form = draw.choice(("jsonl", "csv"))
    kind = draw.choice(("value", "value", "key", "text", "none"))
    if kind in ("value", "key"):
        job = draw.choice(jobs)
        good.discard(job["name"])
        if kind == "value":
            job[draw.choice(list(job))] = odd_value(draw)
        else:
            job[draw.choice(("imag", "seed", "height", "prompt_2", "x" * 300, "", "image_2"))] = odd_value(draw)
    data = written(jobs, form)
    if kind == "text":
        data, how = spoiled(data, draw)
        case.note(how)
        good = set()
    file = case.folder / f"list.{form}"
    file.write_bytes(data)
    case.note(f"{kind}: {data[:600]!r}")
    outcome = case.run("predict", "--config", ground.config(case.folder), "--jobs", file, "--lora", ground.adapter,
                       "--output", output)  # fmt: skip
    case.require(outcome)
    case.require_clean(case.folder)
    made = pictures(output) if output.exists() else {}
    if kind == "none" and outcome.code != 0:
        raise Wrong(f"a good list is refused\n{outcome.told}")
    for name in good if outcome.code == 0 else made.keys() and good:
        wanted, found = ground.edits[f"{name}.png"], made.get(f"{name}.png")
        if found is None:
            if outcome.code == 0:
                raise Wrong(f"{name} was not made, and nobody says so")
        elif len(found) != len(wanted) or max(abs(a - b) for a, b in zip(found, wanted, strict=True)) > 1:
            raise Wrong(f"{name} is another picture than alone with its like")


def written(jobs: list, form: str) -> bytes:
    """Rows as a file of a kind."""
    if form == "json":
        return json.dumps(jobs).encode()
    if form == "jsonl":
        return "".join(json.dumps(job) + "\n" for job in jobs).encode()
    columns = list(dict.fromkeys(key for job in jobs for key in job))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, delimiter="," if form == "csv" else "\t")
    writer.writeheader()
    writer.writerows(jobs)
    return buffer.getvalue().encode("utf-8", "replace")
