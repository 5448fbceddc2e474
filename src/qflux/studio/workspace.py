"""The folder that a studio is opened on, and what may be reached from it.

<root>/<name>.yaml            configs, as `qflux init` writes them
<root>/runs/<name>/           runs
<root>/.qflux-studio/         thumbnails, uploads, tries, the queue; may be deleted
<data>.corrections/           what was changed about a data set, beside it; corrections/ in it, where it is all there is
<name>.pairs.jsonl            a list of pairs, where pictures lie in a layout of their own, as `init` writes it
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from qflux.errors import DataError, cut
from qflux.files.jsonl import GrowingLines
from qflux.runs.folder import RunFolder
from qflux.runs.paths import RunPaths

OWN = ".qflux-studio"
NAME = re.compile(r"[\w][\w.\- ]{0,99}")
_MOST_FOLDERS = 2000
_LONGEST = 1000


@dataclass(frozen=True)
class Workspace:
    """A folder, and the places in it."""

    root: Path
    _known: dict[Path, tuple[object, RunFolder]] = field(default_factory=dict, compare=False, repr=False)
    """Runs that were read, with what told that they had not changed."""

    @classmethod
    def opened(cls, folder: Path) -> Workspace:
        root = folder.expanduser().resolve()
        if not root.is_dir():
            raise DataError(f"there is no folder {folder}", "give the folder of your pictures, or of a project.")
        if not os.access(root, os.W_OK):
            raise DataError(f"{folder} can't be written to", "give a folder of your own.")
        return cls(root)

    @property
    def own(self) -> Path:
        return self.root / OWN

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def inside(self, path: str | Path, what: str = "a path") -> Path:
        """A path in this folder, wherever links lead; an error for any other."""
        try:
            if len(str(path)) > _LONGEST:
                raise ValueError
            found = (self.root / path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise DataError(f"{what} {cut(str(path))} is no path") from None
        if not found.is_relative_to(self.root):
            raise DataError(f"{what} {cut(str(path))} is outside of {self.root}", "open the studio on a folder above.")
        return found

    def relative(self, path: Path) -> str:
        """A path as configs have it: from this folder."""
        found = os.path.relpath(path, self.root)
        return found if not found.startswith("..") else str(path)

    def run_folders(self) -> list[RunFolder]:
        """All runs, wherever they were started: those in `runs/`, and those of other output folders one level up."""
        found: dict[Path, RunFolder] = {}
        parents = [self.runs, *(folder for folder in _folders(self.root) if folder.name != OWN)]
        for parent in parents:
            for folder in _folders(parent):
                if folder.resolve().is_relative_to(self.root) and RunPaths(folder).is_run:
                    found.setdefault(folder.resolve(), self._read(folder))
        return list(found.values())

    def _read(self, folder: Path) -> RunFolder:
        """A run; one that has not changed is not read again, however often a page asks."""
        paths = RunPaths(folder)
        looked_at = (paths.config, paths.metrics, paths.validation, paths.samples, paths.warnings, paths.ledger)
        stamp = [_stamp(path) for path in looked_at]
        known = self._known.get(folder)
        if known is None or known[0] != stamp:
            metrics = known[1].metrics if known is not None else GrowingLines(paths.metrics)
            known = self._known[folder] = (stamp, RunFolder(folder, metrics=metrics))
        return known[1]

    def run(self, name: str) -> RunFolder:
        """A run by its path from here; an error if it is none."""
        folder = self.inside(name, "the run")
        known = {run.path.resolve(): run for run in self.run_folders()}
        if folder not in known:
            raise DataError(f"there is no run {cut(name)}", "it may have been deleted.")
        return known[folder]

    def config_file(self, name: str) -> Path:
        """Where a config of this name is or goes."""
        if not NAME.fullmatch(name) or name.endswith("."):
            raise DataError(f"{cut(name)} can't be the name of a run", "use letters, digits, dots and dashes.")
        return self.inside(f"{name}.yaml")


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())[:_MOST_FOLDERS]
    except OSError:
        return []
