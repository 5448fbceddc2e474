"""A model card, and the way to the hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml
from huggingface_hub import HfApi

from qflux.adapters.files import Record
from qflux.data.store import write_bytes
from qflux.errors import QfluxError

_USE = """```python
import torch
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("{base}", torch_dtype=torch.bfloat16).to("cuda")
pipe.load_lora_weights("{folder}", weight_name="{file}")
```"""


def write_card(folder: Path, record: Record, pipeline: str, file: str, samples: Path | None = None) -> Path:
    """`README.md` of an adapter: what it is, how to use it, what it was trained with, and pictures if there are any."""
    base = record.recipe.get("model", {}).get("pretrained", "")
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
            f"An adapter for {record.family}, trained with qflux {record.version} on images of different sizes.",
            picture,
            _USE.format(pipeline=pipeline, base=base, folder=folder.name, file=file),
            "",
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
    write_bytes(folder / "README.md", text.encode())
    return folder / "README.md"


def upload(folder: Path, repository: str, dry_run: bool) -> Iterator[str]:
    """Upload a folder to the hub. The token comes from the environment and is written nowhere."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    if dry_run:
        for path in files:
            yield f"would upload {path.relative_to(folder)} ({path.stat().st_size:,} bytes) to {repository}"
        return
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise QfluxError("--push needs a token in HF_TOKEN", "create one with write access at huggingface.co.")
    api = HfApi(token=token)
    try:
        api.create_repo(repository, exist_ok=True)
        info = api.upload_folder(folder_path=folder, repo_id=repository, ignore_patterns=[".*"])
    except Exception as error:
        reason = str(error).replace(token, "…")
        raise QfluxError(
            f"{repository} can't be uploaded to: {reason}", "check the name, the token and the network."
        ) from None
    yield f"uploaded {len(files)} files: {info}"
