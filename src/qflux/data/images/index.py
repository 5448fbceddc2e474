"""What is known of every source image, so that planning decodes nothing and reads nothing twice.

    index.jsonl   one line per image: where it is, the signs of its bytes, its facts, and a checksum

Lines are only ever appended; the last line of an image counts, a torn one does not. Killed while indexing, what was
read stays read. When more than half of the lines are outdated the file is written anew.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from qflux.data.images.decode import ImageFacts, ImageRef, read_facts
from qflux.errors import DataError
from qflux.files.atomic import write_bytes
from qflux.files.hashing import file_hash

logger = logging.getLogger(__name__)

WORKERS = min(16, 2 * (os.cpu_count() or 1))
_CHUNK = 2000
"""Images between two writes of the index."""
_TASK = 8

T = TypeVar("T")
R = TypeVar("R")


class FileIndex:
    """The index at `path`, read at once and written as it grows. A read-only place is fine: nothing is kept then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0
        """Images and other files whose bytes were read, because the index did not know them."""
        self._known: dict[str, tuple[list[Any], Any]] | None = None
        self._lock = threading.Lock()
        self._new: list[str] = []

    def facts(
        self, images: Sequence[ImageRef], progress: Callable[[int, int], None] | None = None
    ) -> list[ImageFacts | DataError]:
        """The facts of every image, or why it can't be read, in the order given."""
        results: list[ImageFacts | DataError] = []
        self._load()
        for part in in_parallel(self._one, images):
            results.append(part)
            if len(results) % _CHUNK == 0:
                self.save()
            if progress and (len(results) % 100 == 0 or len(results) == len(images)):
                progress(len(results), len(images))
        self.save()
        return results

    def hash_of(self, path: Path) -> str:
        """The hash of any file, remembered like an image's."""
        status = path.stat()
        stamp = [str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._lookup(stamp)
        if isinstance(known, str):
            return known
        digest = file_hash(path)
        self._remember(stamp, digest)
        return digest

    def tidy(self, staging: Path | None = None) -> None:
        """Write the index anew, one line per image in the order of their places."""
        self.save()
        self._known = None
        if self._load():
            self._compact(staging)

    def save(self) -> None:
        """Append what is new."""
        with self._lock:
            lines, self._new = self._new, []
        if not lines:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                # One write call: lines of processes that index at the same time do not mix.
                file.write(("\n" + "\n".join(lines) + "\n").encode())
        except OSError as error:
            logger.warning("%s can't be written (%s): images are read again next time.", self.path, error.strerror)

    def _one(self, image: ImageRef) -> ImageFacts | DataError:
        try:
            stamp = image.stamp()
        except (OSError, ValueError) as error:  # a path may hold what no path can
            reason = error.strerror if isinstance(error, OSError) else error
            return DataError(f"{image} can't be read as an image: {reason}", "replace or remove the file.")
        known = self._lookup(stamp) if stamp else None
        if isinstance(known, dict):
            return ImageFacts(**known)
        try:
            facts = read_facts(image)
        except DataError as error:
            return error
        self._remember(stamp, facts.dump())
        return facts

    def _lookup(self, stamp: list[Any]) -> Any:
        signs, value = self._load().get(stamp[0], (None, None))
        return value if signs == stamp[1:] else None

    def _remember(self, stamp: list[Any] | None, value: Any) -> None:
        with self._lock:
            self.read += 1
            if stamp:
                self._load()[stamp[0]] = (stamp[1:], value)
                self._new.append(_line(stamp, value))

    def _load(self) -> dict[str, tuple[list[Any], Any]]:
        if self._known is None:
            self._known = {}
            lines = 0
            for line in self._lines():
                lines += 1
                try:
                    stamp, value, checksum = json.loads(line)
                    if checksum != _checksum(stamp, value):
                        continue
                    if isinstance(value, dict):
                        ImageFacts(**value)
                    self._known[stamp[0]] = (stamp[1:], value)
                except (ValueError, TypeError, IndexError, KeyError):
                    continue
            if lines > 2 * len(self._known) + 1000:
                self._compact()
        return self._known

    def _lines(self) -> Iterator[str]:
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                yield from (line for line in file if line.strip())
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s can't be read (%s): images are read again.", self.path, error.strerror)

    def _compact(self, staging: Path | None = None) -> None:
        known = self._known or {}
        lines = [_line([place, *signs], value) for place, (signs, value) in sorted(known.items())]
        try:
            write_bytes(self.path, ("\n".join(lines) + "\n").encode(), staging)
        except OSError as error:
            logger.warning("%s can't be written: %s", self.path, error.strerror)


def _line(stamp: list[Any], value: Any) -> str:
    return json.dumps([stamp, value, _checksum(stamp, value)])


def _checksum(stamp: list[Any], value: Any) -> int:
    return zlib.crc32(json.dumps([stamp, value]).encode())


def in_parallel(work: Callable[[T], R], items: Iterable[T], workers: int = WORKERS) -> Iterator[R]:
    """The results in order. A task is a handful of items, for items may take less time than a task; a few thousand
    items are under way at a time, however many there are."""
    remaining = iter(items)
    with ThreadPoolExecutor(workers) as pool:
        while chunk := list(islice(remaining, _CHUNK)):
            tasks = [chunk[start : start + _TASK] for start in range(0, len(chunk), _TASK)]
            for results in pool.map(lambda task: [work(item) for item in task], tasks):
                yield from results
