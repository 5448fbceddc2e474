"""What somebody has changed about a data set without touching it: prompts, masks, samples that are left out.

A folder of corrections holds `corrections.jsonl`, which only grows, and `masks/`. Each line is a change of any number
of samples, by their names, or takes an earlier one back; a line that a kill has torn is none. What is not said stays as
the source has it:

    {"id": 3, "changes": [{"sample": "cat", "prompt": "make it snow"}, {"sample": "dog", "excluded": true}]}
    {"id": 4, "changes": [{"sample": "cat", "mask": "masks/cat-1f3a.png"}]}
    {"undo": 3}
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qflux.data.images.decode import ImageFile
from qflux.data.sources.listing import ListedSample, Listing
from qflux.data.sources.wording import is_text
from qflux.errors import DataError
from qflux.files.jsonl import append_line, read_lines

FILE, MASKS = "corrections.jsonl", "masks"
KINDS: dict[str, type] = {"prompt": str, "excluded": bool, "mask": str}


@dataclass
class Corrections:
    """The corrections in a folder, which need not be there yet."""

    folder: Path
    done: list[dict[str, Any]] = field(default_factory=list)
    """Changes that hold, in their order."""
    undone: list[dict[str, Any]] = field(default_factory=list)
    """Changes that were taken back and may be made again, the next one last."""
    last: int = 0
    """The number of the newest change."""

    @classmethod
    def read(cls, folder: Path) -> Corrections:
        found = cls(folder)
        found._read()
        return found

    def _read(self) -> None:
        self.done, self.undone, self.last = [], [], 0
        for line in read_lines(self.folder / FILE):
            if isinstance(line.get("id"), int) and isinstance(line.get("changes"), list):
                self._did(line)
            elif self.done and line.get("undo") == self.done[-1]["id"]:
                self.undone.append(self.done.pop())
            elif self.undone and line.get("redo") == self.undone[-1]["id"]:
                self.done.append(self.undone.pop())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else writes meanwhile, and what others have written is known: there may be several pages."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            yield

    def of(self) -> dict[str, dict[str, Any]]:
        """What is said of each sample now. A value of null is none: as the source has it."""
        said: dict[str, dict[str, Any]] = {}
        for line in self.done:
            for change in line["changes"]:
                if isinstance(change, dict) and isinstance(change.get("sample"), str):
                    known = {kind: change[kind] for kind in KINDS if kind in change}
                    said.setdefault(change["sample"], {}).update(known)
        cleaned = {name: {k: v for k, v in about.items() if isinstance(v, KINDS[k])} for name, about in said.items()}
        return {name: about for name, about in cleaned.items() if about}

    def add(self, changes: list[dict[str, Any]]) -> None:
        """Write changes down. What was undone before can't be done again then."""
        for change in changes:
            _require_sound(change)
        with self._alone():
            line = {"id": self.last + 1, "changes": changes}
            self._write(line)
            self._did(line)

    def undo(self) -> bool:
        """Take the last change back; false if there is none."""
        with self._alone():
            if not self.done:
                return False
            self._write({"undo": self.done[-1]["id"]})
            self.undone.append(self.done.pop())
            return True

    def redo(self) -> bool:
        """Do again what was taken back last; false if there is nothing of that kind."""
        with self._alone():
            if not self.undone:
                return False
            self._write({"redo": self.undone[-1]["id"]})
            self.done.append(self.undone.pop())
            return True

    def _did(self, line: dict[str, Any]) -> None:
        self.done.append(line)
        self.undone.clear()
        self.last = max(self.last, line["id"])

    def _write(self, line: dict[str, Any]) -> None:
        path = self.folder / FILE
        if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:  # behind a line that a kill has torn
                file.write("\n")
        append_line(path, line)


def _require_sound(change: dict[str, Any]) -> None:
    for kind, value in change.items():
        if kind == "sample":
            if not isinstance(value, str):
                raise DataError(f"a change of the sample {value!r}, which is no name")
        elif kind not in KINDS:
            raise DataError(f"a change of {kind!r}", f"known: {', '.join(KINDS)}.")
        elif value is not None and not isinstance(value, KINDS[kind]):
            raise DataError(f"{kind} is {value!r}")
    prompt = change.get("prompt")
    if prompt is not None and (not prompt.strip() or not is_text(prompt)):
        raise DataError(f"{change.get('sample')}: the prompt is empty, or not Unicode", "say what to do.")


def correct(listing: Listing, folder: Path) -> Listing:
    """A listing as its corrections would have it; what can't be applied is a fault or a note."""
    said = Corrections.read(folder).of()
    left_out, samples = [], []
    for sample in listing.samples:
        about = said.pop(sample.name, {})
        if about.get("excluded"):
            left_out.append(sample.name)
            continue
        samples.append(corrected(sample, about, folder))
    listing.samples = samples
    if left_out:
        listing.notes.append(f"{folder}: {len(left_out)} samples are left out: {', '.join(left_out[:10])}")
    if said:
        listing.notes.append(f"{folder} is about {len(said)} samples that are not there: {', '.join(list(said)[:10])}")
    return listing


def corrected(sample: ListedSample, about: dict[str, Any], folder: Path) -> ListedSample:
    """A sample with what is said of it. A prompt replaces all wordings there were."""
    if "prompt" in about:
        sample = replace(sample, prompt=about["prompt"].strip(), prompt_2=None, further_captions=())
    if "mask" in about:
        sample = replace(sample, mask=ImageFile(mask_path(folder, about["mask"])))
    return sample


def mask_path(folder: Path, name: str) -> Path:
    """The file of a painted mask; whatever stands there, it is one of the folder's own."""
    return folder / MASKS / Path(name).name
