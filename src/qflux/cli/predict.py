"""`qflux predict`: one edit, or a list of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qflux.cli.terminal import ConfigFile, ConfigOption, Overrides, expanded, one_config, progress_bar, say, trainer_of
from qflux.errors import DataError

if TYPE_CHECKING:
    from qflux.adapters.attach import Weighted
    from qflux.commands import Trainer
    from qflux.sampling.jobs.lists import JobList
    from qflux.sampling.predictor import Predictor

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")

Loras = Annotated[
    list[Path] | None, typer.Option("--lora", help="A LoRA file or an adapter folder; repeat for several.")
]
LoraScales = Annotated[
    list[float] | None, typer.Option("--lora-scale", help="Strength of the LoRA; repeat for several, in their order.")
]


def predict(
    file: ConfigFile = None,
    config: ConfigOption = None,
    prompt: Annotated[str | None, typer.Option(help="The instruction; with --jobs: for jobs that have none.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="Control image; repeat for several, the first is the one to edit.")
    ] = None,
    jobs: Annotated[
        Path | None, typer.Option(help="Many edits: a folder of images, a .csv or a .jsonl; --output is a folder then.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the result goes. Default: prediction.png, or the folder predictions.")
    ] = None,
    lora: Loras = None,
    lora_scale: LoraScales = None,
    prompt_2: Annotated[str | None, typer.Option(help="Prompt of the second text encoder, if another.")] = None,
    negative_prompt: Annotated[
        str | None, typer.Option(help="Switches true CFG on. Default: predict.negative_prompt.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Default: predict.seed.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Default: predict.num_inference_steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Default: predict.guidance_scale.")] = None,
    height: Annotated[int | None, typer.Option(min=16, help="Of the result, with --width; a multiple of 16.")] = None,
    width: Annotated[int | None, typer.Option(min=16, help="Of the result, with --height; a multiple of 16.")] = None,
    size: Annotated[
        str | None, typer.Option(help="HEIGHTxWIDTH of the results, or input: as large as the image to edit.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Edit one image, or many: --jobs.

    qflux predict recipes/flux-kontext.yaml --image photo.jpg --prompt "make it snow" --lora runs/my/adapter
    """
    if guidance is not None and not math.isfinite(guidance):
        raise DataError("--guidance must be a number")
    if (height is None) != (width is None):
        raise DataError("--height and --width go together", "give both or neither.")
    if height is not None and size is not None:
        raise DataError("--size and --height exclude each other", "give one of them.")
    from qflux.data.images.sizes import asked_size, possible_size  # noqa: PLC0415

    asked = (height, width) if height and width else asked_size(size) if size else None
    if isinstance(asked, tuple):
        possible_size(asked)
    settings = list(set_ or [])
    settings += [f"predict.num_inference_steps={steps}"] if steps is not None else []
    settings += [f"predict.guidance_scale={guidance}"] if guidance is not None else []
    settings += [f"predict.seed={seed}"] if seed is not None else []
    settings += [f"predict.size={json.dumps(asked)}"] if asked is not None else []
    from qflux.sampling.jobs.lists import jobs_of, read_jobs, require_text  # noqa: PLC0415

    for text in (prompt, prompt_2, negative_prompt):
        require_text(text, "a prompt")
    if prompt is None or jobs is not None:
        alone = {"--image": image, "--prompt-2": prompt_2}
        given = [name for name, value in alone.items() if value]
        if given and jobs is not None:
            raise DataError(f"{given[0]} is for one edit, --jobs for many", "put it into the list of jobs.")
        if given:
            raise DataError(f"{given[0]} needs a --prompt", "say what to do, or give --jobs.")
    trainer = trainer_of(one_config(file, config), settings)
    named = trainer.config.predict
    loras = weighted(lora or named.lora, lora_scale)
    if jobs is not None:
        _predict_many(trainer, read_jobs(expanded(jobs), prompt), output or Path("predictions"), negative_prompt, loras)
        return
    if prompt is None:
        if not named.prompts:
            raise DataError("there is no --prompt", "say what to do, give --jobs, or set predict.prompts.")
        _predict_many(trainer, jobs_of(named), output or named.output or Path("predictions"), negative_prompt, loras)
        return
    target = _image_file(output or Path("prediction.png"), image or [])
    _predict_one(trainer, image or [], (prompt, prompt_2, negative_prompt), target, loras)


def _predict_one(
    trainer: Trainer,
    images: Sequence[Path],
    prompts: tuple[str, str | None, str | None],
    output: Path,
    loras: list[Weighted],
) -> None:
    from qflux.data.images.decode import ImageFile, load_rgb  # noqa: PLC0415
    from qflux.files.atomic import sweep, write_bytes  # noqa: PLC0415
    from qflux.sampling.jobs.gallery import encoded  # noqa: PLC0415
    from qflux.sampling.predictor import Edit  # noqa: PLC0415

    settings = trainer.config.predict
    prompt, prompt_2, negative = prompts
    edit = Edit(
        controls=tuple(load_rgb(ImageFile(path)) for path in images),
        prompt=prompt,
        prompt_2=prompt_2,
        negative_prompt=settings.negative_prompt if negative is None else negative,
        seed=settings.seed,
        size=settings.size,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    sweep(output.parent, output.name)
    predictor = trainer.predictor(loras)
    with progress_bar() as bar:
        task = bar.add_task("predict", total=None, note="")
        (result,) = predictor([edit], on_step=lambda done, total: bar.update(task, completed=done, total=total))
    notes = {
        "prompt": prompt,
        "prompt_2": prompt_2,
        "negative_prompt": edit.negative_prompt,
        "seed": edit.seed,
        "size": [result.height, result.width],
        **_circumstances(trainer, predictor, loras),
    }
    write_bytes(output, encoded(result, output.suffix.lower(), notes))
    say(f"{result.width}x{result.height}, seed {edit.seed}: {output}")


def _predict_many(
    trainer: Trainer,
    listed: JobList,
    output: Path,
    negative_prompt: str | None,
    loras: list[Weighted],
) -> None:
    from qflux.files.locks import exclusive  # noqa: PLC0415
    from qflux.sampling.jobs.run import JobRun  # noqa: PLC0415

    output = expanded(output)
    if output.exists() and not output.is_dir():
        raise DataError(f"--output {output} is no folder", "with --jobs, give a folder.")
    settings = trainer.config.predict
    negative = settings.negative_prompt if negative_prompt is None else negative_prompt
    predictor = trainer.predictor(loras)
    with exclusive(output), progress_bar() as bar:
        run = JobRun(predictor, output, _circumstances(trainer, predictor, loras), settings)
        task = bar.add_task("predict", total=len(listed.jobs), note="")
        report = run(
            listed.jobs, negative, lambda done, total, note: bar.update(task, completed=done, total=total, note=note)
        )
    kept = f", {len(report.kept)} were there already" if report.kept else ""
    say(f"{len(report.made)} images made{kept}: {output}")
    if report.sheet:
        say(str(report.sheet))
    problems = [*listed.problems, *report.problems]
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        total, done = len(listed.jobs) + len(listed.problems), len(report.made) + len(report.kept)
        headline = f"{total - done} of {total} jobs can't be done; the other {done} are in {output}"
        headline = headline if done else "no job can be done"
        raise DataError(f"{headline}:{lines}", "fix them and run again.")


def _circumstances(trainer: Trainer, predictor: Predictor, loras: list[Weighted]) -> dict[str, Any]:
    """What an image depends on besides its edit; it is written into the file."""
    from qflux.adapters.files import read_adapter  # noqa: PLC0415
    from qflux.files.hashing import file_hash  # noqa: PLC0415
    from qflux.models.loading import transformer_identity  # noqa: PLC0415
    from qflux.version import VERSION  # noqa: PLC0415

    files = [(read_adapter(adapter.path).path, adapter.weight) for adapter in loras]
    return {
        "software": f"qflux {VERSION}",
        "family": trainer.config.family,
        "model": Path(trainer.config.model.pretrained).name,
        "weights": transformer_identity(trainer.config.model),
        "dtype": trainer.config.model.dtype,
        "quantization": trainer.config.model.quantization,
        "adapters": [{"name": file.name, "sha256": file_hash(file), "weight": weight} for file, weight in files],
        **predictor.settings(),
    }


def weighted(loras: Sequence[Path] | None, scales: Sequence[float] | None) -> list[Weighted]:
    from qflux.adapters.attach import Weighted  # noqa: PLC0415

    paths, weights = list(loras or []), list(scales or [])
    if weights and not paths:
        raise DataError("--lora-scale has no effect without --lora", "give both or neither.")
    if len(weights) not in (0, len(paths)):
        raise DataError(f"{len(paths)} --lora and {len(weights)} --lora-scale", "give a scale for each, or none.")
    if not all(math.isfinite(weight) for weight in weights):
        raise DataError("--lora-scale must be a number")
    return [Weighted(expanded(p), w) for p, w in zip(paths, weights or [1.0] * len(paths), strict=True)]


def _image_file(output: Path, images: Sequence[Path]) -> Path:
    from qflux.sampling.jobs.gallery import read_notes  # noqa: PLC0415

    output = expanded(output)
    if output.suffix.lower() not in SUFFIXES:
        raise DataError(f"--output {output} is no image file name", "use .png, .jpg or .webp.")
    if output.is_dir():
        raise DataError(f"--output {output} is a folder", "give a file name.")
    if any(output.resolve() == expanded(image).resolve() for image in images):
        raise DataError(f"--output {output} is the image to edit", "give another name.")
    if output.exists() and not read_notes(output):
        raise DataError(f"--output {output} is there already, and was not made by qflux", "give another name.")
    return output
