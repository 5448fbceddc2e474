"""The data sets of a workspace: samples a window at a time, pictures made small once, corrections, findings.

Nothing but names and prompts is read to open a set; the sizes of images are read for what is shown. 10,000 pairs open
in a second.
"""

from __future__ import annotations

import io
import json
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import TypeAdapter

from qflux.config.data import AnySource
from qflux.data.images.decode import ImageFile, ImageRef, load_mask, load_rgb
from qflux.data.sources import READERS
from qflux.data.sources.corrections import MASKS, Corrections, corrected, mask_path
from qflux.data.sources.listing import Fault, ListedSample
from qflux.errors import DataError, QfluxError, cut
from qflux.files.atomic import write_bytes
from qflux.files.hashing import key_of
from qflux.start.layouts import TABLE, discover
from qflux.start.request import config_name
from qflux.studio.workspace import OWN, Workspace

SIDES = (320, 1600)
"""Longer sides of pictures: on the wall, and looked at closely."""
MOST_WINDOW = 200
_MOST_MASK = 4096 * 4096


@dataclass
class DataSet:
    """One data set of a workspace."""

    id: str
    kind: str
    source: dict[str, Any]
    """As it stands in a config."""
    root: Path
    corrections_folder: Path
    workspace: Workspace
    findings: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """What `inspect` said of a sample, by its name."""
    general: list[dict[str, str]] = field(default_factory=list)
    """What it said of none in particular."""
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @cached_property
    def _listed(self) -> tuple[dict[str, ListedSample], list[Fault]]:
        parsed: Any = TypeAdapter(AnySource).validate_python(self.source)
        listing = READERS[parsed.type](parsed)
        return {sample.name: sample for sample in listing.samples}, listing.faults

    @cached_property
    def corrections(self) -> Corrections:
        return Corrections.read(self.corrections_folder)

    @property
    def faults(self) -> list[Fault]:
        return self._listed[1]

    def refresh(self) -> None:
        """Look at the folder again."""
        with self._lock:
            self.__dict__.pop("_listed", None)
            self.__dict__.pop("corrections", None)

    def sample(self, name: str) -> ListedSample:
        """A sample as it is now."""
        found = self._listed[0].get(name)
        if found is None:
            raise DataError(f"there is no sample {cut(name)}", "the folder may have changed: look at it again.")
        return corrected(found, self.corrections.of().get(name, {}), self.corrections_folder)

    def window(self, start: int, count: int, words: str, only: str) -> dict[str, Any]:
        """A stretch of the samples that have these words in name or prompt, and this kind of finding."""
        said = self.corrections.of()
        names = list(self._chosen(said, words.lower(), only))
        shown = names[max(0, start) : max(0, start) + min(count, MOST_WINDOW)]
        return {
            "total": len(names),
            "all": len(self._listed[0]),
            "start": start,
            "rows": [self._row(name, said.get(name, {})) for name in shown],
        }

    def _chosen(self, said: dict[str, dict[str, Any]], words: str, only: str) -> Iterator[str]:
        for name, sample in self._listed[0].items():
            about = said.get(name, {})
            if words and words not in f"{name}\n{about.get('prompt', sample.prompt)}".lower():
                continue
            kinds = {finding["kind"] for finding in self.findings.get(name, ())}
            matches = {
                "": True,
                "findings": bool(kinds),
                "changed": bool(about),
                "excluded": bool(about.get("excluded")),
                "mask": sample.mask is not None or "mask" in about,
            }
            if matches.get(only, only in kinds):
                yield name

    def _row(self, name: str, about: dict[str, Any]) -> dict[str, Any]:
        listed = self._listed[0][name]
        sample = corrected(listed, about, self.corrections_folder)
        return {
            "name": name,
            "prompt": sample.prompt,
            "captions": list(sample.further_captions),
            "prompt_2": sample.prompt_2,
            "original": listed.prompt if "prompt" in about else None,
            "excluded": bool(about.get("excluded")),
            "has_mask": sample.mask is not None,
            "is_painted": "mask" in about,
            "mask": about.get("mask", ""),
            "images": [_size(ref) for ref in sample.images],
            "findings": self.findings.get(name, []),
        }

    def picture(self, name: str, role: str, large: bool) -> tuple[bytes, str]:
        """A picture of a sample made small, once, and its type."""
        ref, is_mask = self._ref(self.sample(name), role)
        if isinstance(ref, ImageFile):
            self.workspace.inside(ref.path, "the picture")  # a table, or a link, may lead anywhere
        side = SIDES[large]
        stamp = ref.stamp() or [secrets.token_hex(8)]
        file = (
            self.workspace.own
            / "thumbnails"
            / f"{key_of('thumbnail', stamp, side, is_mask)}.{'png' if is_mask else 'webp'}"
        )
        if not file.exists():
            image = load_mask(ref) if is_mask else load_rgb(ref)
            image.thumbnail((side, side), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, "PNG" if is_mask else "WEBP", quality=86, method=2)
            with self._lock:  # two requests for one picture would write to one unfinished file
                write_bytes(file, buffer.getvalue())
        return file.read_bytes(), "image/png" if is_mask else "image/webp"

    def _ref(self, sample: ListedSample, role: str) -> tuple[ImageRef, bool]:
        if role == "target":
            return sample.target, False
        if role == "mask" and sample.mask is not None:
            return sample.mask, True
        found = re.fullmatch(r"control(\d{1,3})", role)
        if found and int(found[1]) < len(sample.controls):
            return sample.controls[int(found[1])], False
        raise DataError(f"{sample.name} has no {cut(role)}")

    def change(self, changes: list[dict[str, Any]]) -> None:
        """Correct samples; every one must be there."""
        with self._lock:
            for change in changes:
                self.sample(str(change.get("sample")))
                if change.get("mask") is not None:
                    raise DataError("a mask is painted, not named")
            self.corrections.add(changes)

    def undo(self) -> bool:
        with self._lock:
            return self.corrections.undo()

    def redo(self) -> bool:
        with self._lock:
            return self.corrections.redo()

    def replace_words(self, find: str, put: str, is_try: bool) -> list[dict[str, str]]:
        """Replace words in all prompts; or only say what would become of them."""
        if not find:
            raise DataError("there is nothing to look for", "say which words.")
        said, found = self.corrections.of(), []
        for name, sample in self._listed[0].items():
            prompt = said.get(name, {}).get("prompt", sample.prompt)
            if find in prompt:
                found.append({"sample": name, "before": prompt, "prompt": prompt.replace(find, put)})
        if not is_try and found:
            with self._lock:
                self.corrections.add([{"sample": item["sample"], "prompt": item["prompt"]} for item in found])
        return found

    def paint(self, name: str, data: bytes) -> None:
        """A mask that somebody has painted: a picture of any size, brought to the target's."""
        width, height = _size(self.sample(name).target)
        try:
            with Image.open(io.BytesIO(data)) as image:
                if image.width * image.height > _MOST_MASK:
                    raise DataError(f"a mask of {image.width}x{image.height} pixels", "paint a smaller one.")
                grey = image.convert("RGBA").getchannel("A") if image.mode == "RGBA" else image.convert("L")
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"that is no picture: {error}") from None
        buffer = io.BytesIO()
        grey.resize((width, height), Image.Resampling.BILINEAR).save(buffer, "PNG")
        stem = re.sub(r"[^\w.-]+", "_", name)[:80]
        file = mask_path(self.corrections_folder, f"{stem}-{secrets.token_hex(4)}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, buffer.getvalue())
        with self._lock:
            self.corrections.add([{"sample": name, "mask": f"{MASKS}/{file.name}"}])

    def take_findings(self, report: dict[str, Any]) -> None:
        """What `inspect --json` found, sorted by the samples it is about."""
        by_sample: dict[str, list[dict[str, str]]] = {}
        general = []
        owners = {place: name for name, sample in self._listed[0].items() for place in _places(sample)}
        for finding in report.get("findings", []):
            name = owners.get(finding["what"])
            if name is None:
                general.append(finding)
            else:
                by_sample.setdefault(name, []).append(finding)
        self.findings, self.general = by_sample, general

    def counts(self) -> dict[str, int]:
        """Samples by kind of finding, the commonest first."""
        found: dict[str, int] = {}
        for findings in self.findings.values():
            for kind in {finding["kind"] for finding in findings}:
                found[kind] = found.get(kind, 0) + 1
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def described(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "samples": len(self._listed[0]),
            "faults": [{"what": fault.what, "problem": fault.problem} for fault in self.faults[:200]],
            "findings": self.counts(),
            "general": self.general[:50],
            "changed": len(self.corrections.of()),
            "source": self.config_source(),
        }

    def config_source(self) -> dict[str, Any]:
        """The source as a config has it, with the corrections if there are any."""
        found = dict(self.source)
        if self.corrections.of():
            found["corrections"] = str(self.corrections_folder)
        return found


def _places(sample: ListedSample) -> list[str]:
    return [sample.name, *(str(ref) for ref in sample.files)]


def _size(ref: ImageRef) -> tuple[int, int]:
    """Width and height as it is shown, from the header; 0 where it can't be read."""
    try:
        with ref.open() as stream, Image.open(stream) as image:
            width, height = image.size
            return (height, width) if image.getexif().get(0x0112) in (5, 6, 7, 8) else (width, height)
    except Exception:  # decoders raise whatever the bytes make them raise
        return 0, 0


class Library:
    """The data sets of a workspace, by their ids."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._sets: dict[str, DataSet] = {}
        self._lock = threading.Lock()

    def sets(self) -> list[dict[str, Any]]:
        """The data sets that are there: the workspace itself, or folders and tables in it."""
        found = []
        for path in self._candidates():
            name = self._workspace.relative(path)
            try:
                found.append({"id": name, "samples": len(self[name]._listed[0])})
            except QfluxError as error:
                found.append({"id": name, "problem": error.headline})
        return [item for item in found if "problem" not in item] or found[:1]

    def __getitem__(self, name: str) -> DataSet:
        with self._lock:
            if name not in self._sets:
                self._sets[name] = self._opened(name)
            return self._sets[name]

    def _opened(self, name: str) -> DataSet:
        path = self._workspace.inside(name, "the data set")
        found = discover(path)
        source = dict(found.source)
        if found.rows:
            table = self._workspace.root / config_name(path).with_suffix(TABLE).name
            if not table.exists():  # somebody may have written it, and runs may go by it
                rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows)
                write_bytes(table, rows.encode())
            source = {"type": "jsonl", "path": str(table), "root": source.get("root", str(path))}
        is_all = path == self._workspace.root
        beside = path / "corrections" if is_all else path.parent / f"{path.name}.corrections"
        return DataSet(name, found.kind, source, path, beside, self._workspace)

    def _candidates(self) -> list[Path]:
        root = self._workspace.root
        if (root / "training_images").is_dir():
            return [root]
        inside = [p for p in sorted(root.iterdir()) if p.resolve().is_relative_to(root) and _is_plain(p)]
        folders = [p for p in inside if p.is_dir() and p.name not in (OWN, "runs", "corrections")]
        known = [folder for folder in folders if (folder / "training_images").is_dir()]
        if known:
            return known
        # The folder itself, if it is understood; else each in it that is.
        return [root] if _is_understood(root) else [folder for folder in folders if _is_understood(folder)]


def _is_plain(folder: Path) -> bool:
    return not folder.name.startswith(".") and not folder.name.endswith(".corrections")


def _is_understood(folder: Path) -> bool:
    try:
        discover(folder)
    except (QfluxError, OSError):
        return False
    return True
