"""Edits tried out: uploaded pictures, a prompt, a LoRA or none; results are kept with what they were made from."""

from __future__ import annotations

import io
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from qflux.data.images.decode import ImageFile, load_rgba
from qflux.errors import DataError, cut
from qflux.files.atomic import write_bytes, write_json
from qflux.studio.processes import Job, JobFolder
from qflux.studio.queue import Queue
from qflux.studio.workspace import Workspace

_ID = re.compile(r"[0-9a-f]{16}")
_LORAS = ("adapter", "best")


@dataclass(frozen=True)
class Tries:
    """The uploads and results of a workspace."""

    workspace: Workspace
    queue: Queue

    @property
    def uploads(self) -> Path:
        return self.workspace.own / "uploads"

    @property
    def folder(self) -> Path:
        return self.workspace.own / "tries"

    def upload(self, data: bytes) -> dict[str, Any]:
        """Keep a picture, decoded and written anew: of a file that is none, nothing is kept."""
        self.uploads.mkdir(parents=True, exist_ok=True)
        name = secrets.token_hex(8)
        raw = self.uploads / f"{name}.upload"
        raw.write_bytes(data)
        try:
            image = load_rgba(ImageFile(raw))
        finally:
            raw.unlink()
        buffer = io.BytesIO()
        opaque = image.getchannel("A").getextrema() == (255, 255)
        (image.convert("RGB") if opaque else image).save(buffer, "PNG")
        write_bytes(self.uploads / f"{name}.png", buffer.getvalue())
        return {"id": name, "width": image.width, "height": image.height}

    def uploaded(self, name: str) -> Path:
        path = self.uploads / f"{name}.png"
        if not _ID.fullmatch(name) or not path.is_file():
            raise DataError(f"there is no uploaded picture {cut(name)}", "drop it again.")
        return path

    def start(self, asked: dict[str, Any]) -> list[JobFolder]:
        """Queue an edit for each seed."""
        prompt = str(asked.get("prompt", "")).strip()
        if not prompt:
            raise DataError("there is no prompt", "say what to do.")
        images = [self.uploaded(str(name)) for name in asked.get("images", [])]
        run = self.workspace.run(str(asked.get("run", "")))
        seeds = asked.get("seeds") or [0]
        if not isinstance(seeds, list) or len(seeds) > 16 or not all(_is_whole(seed) for seed in seeds):
            raise DataError("seeds are up to 16 whole numbers")
        strength = float(asked.get("strength", 1.0))
        steps = asked.get("steps")
        options = ["--config", str(run.paths.config), "--prompt", prompt]
        for path in images:
            options += ["--image", str(path)]
        which = str(asked.get("lora", "adapter"))
        if which in _LORAS:
            lora = run.path / which
            if not lora.is_dir():
                raise DataError(f"{run.name} has no {which} yet", "wait for its first checkpoint, or its end.")
            options += ["--lora", str(lora), "--lora-scale", f"{strength:g}"]
        elif which != "none":
            raise DataError(f"{cut(which)} is no LoRA of a run", f"use one of {', '.join((*_LORAS, 'none'))}.")
        if asked.get("negative_prompt"):
            options += ["--negative-prompt", str(asked["negative_prompt"])]
        if steps is not None:
            options += ["--steps", str(int(steps))]
        started = []
        self.folder.mkdir(parents=True, exist_ok=True)
        for seed in seeds:
            name = secrets.token_hex(8)
            output = self.folder / f"{name}.png"
            about = {
                "try": name,
                "prompt": prompt,
                "images": [path.stem for path in images],
                "run": self.workspace.relative(run.path),
                "lora": which,
                "strength": strength,
                "seed": seed,
            }
            write_json(self.folder / f"{name}.json", about)
            command = ["predict", *options, "--seed", str(seed), "--output", str(output)]
            started.append(self.queue.add(Job("try", command, about, self.queue.free_lane())))
        return started

    def described(self) -> list[dict[str, Any]]:
        """All tries, the newest first."""
        states = {job.get("try"): job for job in self.queue.described() if job["kind"] == "try"}
        found = []
        files = (
            sorted(self.folder.glob("*.json"), key=lambda path: -path.stat().st_mtime) if self.folder.is_dir() else []
        )
        for file in files[:200]:
            try:
                about = json.loads(file.read_text())
            except (OSError, ValueError):
                continue
            is_there = file.with_suffix(".png").is_file()
            job = states.get(about.get("try"))
            state = "done" if is_there else job["state"] if job else "interrupted"
            found.append(about | {"state": state, "job": job["id"] if job else None})
        return found

    def result(self, name: str) -> Path:
        path = self.folder / f"{name}.png"
        if not _ID.fullmatch(name) or not path.is_file():
            raise DataError(f"there is no result {cut(name)}")
        return path

    def forget(self, name: str) -> None:
        if not _ID.fullmatch(name) or not (self.folder / f"{name}.json").is_file():
            raise DataError(f"there is no result {cut(name)}")
        for suffix in (".png", ".json"):
            (self.folder / f"{name}{suffix}").unlink(missing_ok=True)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def small_picture(path: Path, side: int) -> bytes:
    """A picture for the page."""
    with Image.open(path) as image:
        shown = image.convert("RGBA" if image.mode in ("RGBA", "LA", "P") else "RGB")
    shown.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    shown.save(buffer, "WEBP", quality=88, method=2)
    return buffer.getvalue()
