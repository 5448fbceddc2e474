"""`qflux predict`: one edit, or a list of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from qflux.cli.options import ConfigFile, ConfigOption, Loras, LoraScales, Overrides, one_config, takes, weighted
from qflux.cli.terminal import console, expanded, progress_bar, say, trainer_of
from qflux.errors import DataError

if TYPE_CHECKING:
    from qflux.adapters.attach import Weighted
    from qflux.commands import Trainer
    from qflux.sampling.jobs.comparison import Comparison
    from qflux.sampling.jobs.lists import JobList


@dataclass(frozen=True)
class PredictOptions:
    file: ConfigFile = None
    config: ConfigOption = None
    prompt: Annotated[str | None, typer.Option(help="The instruction; with --jobs: for jobs that have none.")] = None
    image: Annotated[
        list[Path] | None, typer.Option(help="Control image; repeat for several, the first is the one to edit.")
    ] = None
    jobs: Annotated[
        Path | None, typer.Option(help="Many edits: a folder of images, a .csv or a .jsonl; --output is a folder then.")
    ] = None
    output: Annotated[
        Path | None, typer.Option(help="Where the result goes. Default: prediction.png, or the folder predictions.")
    ] = None
    lora: Loras = None
    lora_scale: LoraScales = None
    prompt_2: Annotated[str | None, typer.Option(help="Prompt of the second text encoder, if another.")] = None
    negative_prompt: Annotated[
        str | None, typer.Option(help="Switches true CFG on. Default: predict.negative_prompt.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Default: predict.seed.")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Default: predict.num_inference_steps.")] = None
    guidance: Annotated[float | None, typer.Option(help="Default: predict.guidance_scale.")] = None
    height: Annotated[int | None, typer.Option(min=16, help="Of the result, with --width; a multiple of 16.")] = None
    width: Annotated[int | None, typer.Option(min=16, help="Of the result, with --height; a multiple of 16.")] = None
    size: Annotated[
        str | None, typer.Option(help="HEIGHTxWIDTH of the results, or input: as large as the image to edit.")
    ] = None
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="With --jobs: make the edits without the LoRA too, and measure what both did besides the edit.",
        ),
    ] = False
    set_: Overrides = None

    def overrides(self) -> list[str]:
        """What the options say as settings of the config."""
        from qflux.data.images.sizes import asked_size, possible_size  # noqa: PLC0415

        if self.guidance is not None and not math.isfinite(self.guidance):
            raise DataError("--guidance must be a number")
        if (self.height is None) != (self.width is None):
            raise DataError("--height and --width go together", "give both or neither.")
        if self.height is not None and self.size is not None:
            raise DataError("--size and --height exclude each other", "give one of them.")
        asked = asked_size(self.size) if self.size else None
        asked = (self.height, self.width) if self.height and self.width else asked
        if isinstance(asked, tuple):
            possible_size(asked)
        named = {"num_inference_steps": self.steps, "guidance_scale": self.guidance, "seed": self.seed, "size": asked}
        settings = [f"predict.{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
        return [*(self.set_ or []), *settings]

    def require_one_way(self) -> None:
        """An error for options that are for one edit where there are many, or none."""
        if self.compare and self.prompt is not None and self.jobs is None:
            raise DataError("--compare needs a list of edits", "give --jobs, with what is wanted or masks beside them.")
        if self.prompt is not None and self.jobs is None:
            return
        given = [name for name, value in {"--image": self.image, "--prompt-2": self.prompt_2}.items() if value]
        if given and self.jobs is not None:
            raise DataError(f"{given[0]} is for one edit, --jobs for many", "put it into the list of jobs.")
        if given:
            raise DataError(f"{given[0]} needs a --prompt", "say what to do, or give --jobs.")


@takes(PredictOptions)
def predict(options: PredictOptions) -> None:
    """Edit one image, or many: --jobs.

    qflux predict recipes/flux-kontext.yaml --image photo.jpg --prompt "make it snow" --lora runs/my/adapter
    """
    settings = options.overrides()
    from qflux.sampling.jobs.lists import jobs_of, read_jobs, require_text  # noqa: PLC0415

    for text in (options.prompt, options.prompt_2, options.negative_prompt):
        require_text(text, "a prompt")
    options.require_one_way()
    trainer = trainer_of(one_config(options.file, options.config), settings)
    named = trainer.config.predict
    loras = weighted(options.lora or named.lora, options.lora_scale)
    if options.jobs is not None:
        listed = read_jobs(expanded(options.jobs), options.prompt)
        _predict_many(trainer, listed, options.output or Path("predictions"), options, loras)
    elif options.prompt is not None:
        _predict_one(trainer, options, loras)
    elif named.prompts:
        output = options.output or named.output or Path("predictions")
        _predict_many(trainer, jobs_of(named), output, options, loras)
    else:
        raise DataError("there is no --prompt", "say what to do, give --jobs, or set predict.prompts.")


def _predict_one(trainer: Trainer, options: PredictOptions, loras: list[Weighted]) -> None:
    from qflux.sampling.jobs.gallery import image_file  # noqa: PLC0415
    from qflux.sampling.jobs.lists import Job  # noqa: PLC0415
    from qflux.sampling.jobs.run import opened, predict_one  # noqa: PLC0415

    images = tuple(map(expanded, options.image or []))
    output = image_file(expanded(options.output or Path("prediction.png")), images)
    job = Job(output.stem, images, options.prompt or "", options.prompt_2, options.negative_prompt)
    edit = opened(job, trainer.config.predict)  # what is missing is said before a model is loaded
    output.parent.mkdir(parents=True, exist_ok=True)
    predictor = trainer.predictor(loras)
    with progress_bar() as bar:
        task = bar.add_task("predict", total=None, note="")
        made = predict_one(
            trainer.config, predictor, loras, edit, output, lambda n, total: bar.update(task, completed=n, total=total)
        )
    say(f"{made.width}x{made.height}, seed {trainer.config.predict.seed}: {output}")


def _predict_many(
    trainer: Trainer, listed: JobList, output: Path, options: PredictOptions, loras: list[Weighted]
) -> None:
    from qflux.sampling.jobs.comparison import predict_and_compare  # noqa: PLC0415
    from qflux.sampling.jobs.run import predict_many  # noqa: PLC0415

    output = expanded(output)
    if output.exists() and not output.is_dir():
        raise DataError(f"--output {output} is no folder", "with --jobs, give a folder.")
    predictor = trainer.predictor(loras)
    with progress_bar() as bar:
        task = bar.add_task("predict", total=len(listed.jobs), note="")

        def progress(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done, total=total, note=note)

        given = (trainer.config, predictor, loras, listed.jobs, output, options.negative_prompt, progress)
        report, compared = predict_and_compare(*given) if options.compare else (predict_many(*given), None)
    kept = f", {len(report.kept)} were there already" if report.kept else ""
    say(f"{len(report.made)} images made{kept}: {output}")
    if report.sheet:
        say(str(report.sheet))
    if compared is not None:
        _show(compared)
    report.require_all(listed, output)


def _show(compared: Comparison) -> None:
    """The means, and the edits that changed most of what they should have left alone."""
    has_base = any(edit.before for edit in compared.edits)
    table = Table(f"mean of {len(compared.edits)} edits", *(["without the LoRA"] if has_base else []), "with it")
    for name, values in compared.means().items():
        shown = values if has_base else values[1:]
        table.add_row(name, *("" if value is None else f"{value:.3f}" for value in shown))
    if table.row_count:
        console.print(table)
    else:
        say("nothing could be measured: give masks, or what is wanted, beside the images")
    for edit in [edit for edit in compared.edits if edit.change > 0][:3]:
        say(f"{edit.name}: colours outside of the edit changed by {edit.change:.1f} (CIEDE2000)")
    say(str(compared.file))
