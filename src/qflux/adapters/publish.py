"""A model card, and the way to the hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from huggingface_hub import CommitOperationAdd, HfApi

from qflux.adapters.files import Record
from qflux.errors import QfluxError
from qflux.files.atomic import write_bytes
from qflux.models.family import Family

MARK = "trained with qflux"
"""Every card says this; a README that does not is somebody's own."""
_USE = """```python
import torch
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("{base}", torch_dtype=torch.bfloat16).to("cuda")
pipe.load_lora_weights("{folder}", weight_name="{file}")
```"""


def write_card(
    folder: Path, record: Record, family: Family, file: str, samples: Path | None = None, pipeline: str | None = None
) -> Path:
    """`README.md` of an adapter: what it is, how to use it, what it was trained with, and pictures if there are any.

    `pipeline` is the checkpoint's, by default its family's.
    """
    model = record.recipe.get("model")
    base = str(model.get("pretrained", "")) if isinstance(model, dict) else ""
    picture = ""
    if samples is not None and samples.is_file():
        shutil.copyfile(samples, folder / "samples.png")
        picture = "\n![Control, output and wanted image of held-out samples](samples.png)\n"
    head = {"base_model": base, "library_name": "diffusers", "tags": ["lora", "image-editing", "qflux", record.family]}
    settings = {
        "family": record.family,
        "preprocessing": record.preprocessing,
        "timesteps": record.timesteps,
        **record.recipe,
    }
    text = "\n".join(
        [
            "---",
            yaml.safe_dump(head, sort_keys=False).strip(),
            "---",
            "",
            f"# {folder.resolve().parent.name}",
            "",
            f"An adapter for {record.family}, {MARK} {record.version} on images of different sizes.",
            picture,
            _USE.format(pipeline=pipeline or family.pipeline, base=base, folder=folder.name, file=file),
            "",
            *([family.usage_note, ""] if family.usage_note else []),
            "Images were preprocessed like this in training, and should be in use:",
            "",
            "```yaml",
            yaml.safe_dump({"preprocessing": record.preprocessing}, sort_keys=False).strip(),
            "```",
            "",
            "## Effective configuration",
            "",
            "```yaml",
            yaml.safe_dump(settings, sort_keys=False).strip(),
            "```",
            "",
        ]
    )
    card = folder / "README.md"
    if card.exists() and MARK not in card.read_text(encoding="utf-8", errors="replace"):
        card = folder / f"{Path(file).stem}.md"  # somebody's own README stays
    write_bytes(card, text.encode())
    return card


def write_merged_card(folder: Path, base: str, pipeline: str, adapters: Sequence[str]) -> None:
    """`README.md` of a checkpoint that adapters were merged into."""
    head = {"base_model": base, "library_name": "diffusers", "tags": ["image-editing", "qflux"]}
    text = f"---\n{yaml.safe_dump(head, sort_keys=False).strip()}\n---\n\n# {base} with adapters\n\n"
    text += f"{base} with {', '.join(adapters)} merged into its weights by qflux. Load it with `{pipeline}`.\n"
    write_bytes(folder / "README.md", text.encode())


def upload(files: Mapping[str, Path], repository: str, dry_run: bool) -> Iterator[str]:
    """Upload files, by their names in the repository. The token comes from the environment and is written nowhere."""
    if dry_run:
        for name, path in files.items():
            yield f"would upload {name} ({path.stat().st_size:,} bytes) to {repository}: {path}"
        return
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        raise QfluxError("--push needs a token in HF_TOKEN", "create one with write access at huggingface.co.")
    if not (token.isascii() and token.isprintable()):
        raise QfluxError("HF_TOKEN holds characters that no token has", "set it again.")
    api = HfApi(token=token)
    try:
        api.create_repo(repository, exist_ok=True)
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        info = api.create_commit(repository, operations, commit_message="Upload with qflux")
    except Exception as error:
        reason = str(error).replace(token, "…")
        raise QfluxError(
            f"{repository} can't be uploaded to: {reason}", "check the name, the token and the network."
        ) from None
    yield f"uploaded {len(files)} files: {info.commit_url}"
