"""Make every entry that is missing, once, however many processes are at it.

1. `_work`       every entry of every sample, each once, with a recipe; what is there is left out
2. `_claimed`    units of work, one size at a time; what another process has claimed is put off
3. `read_ahead`  threads decode while the encoder works
4. the encoder, one kind after the other: text encoders leave the memory before the VAE enters
5. manifests, for the samples that are complete

Interrupted at any point, a second run goes on where this one was.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from qflux.cache.cache import EmbeddingCacheManager, text_tensors
from qflux.cache.encode import open_image, open_mask, open_prompt
from qflux.cache.samples import keys_of
from qflux.data.reader import read_ahead
from qflux.data.sample import Sample
from qflux.errors import CacheError, DataError
from qflux.files.locks import Claims
from qflux.launch import launched
from qflux.models.family import Encoder
from qflux.ragged.shapes import image_tokens

logger = logging.getLogger(__name__)

_TIMED = 3
"""Units of work that a forecast of the time is made from, after as many to warm up."""


@dataclass(frozen=True)
class Estimate:
    """What a run is about to do."""

    prompts: int
    images: int
    masks: int
    bytes: int
    free: int
    """Bytes free on the disk of the cache."""

    @property
    def entries(self) -> int:
        return self.prompts + self.images + self.masks


@dataclass
class CacheReport:
    """What `qflux cache` did."""

    samples: int = 0
    new_entries: int = 0
    reused_entries: int = 0
    """Found in the cache, or made by another process meanwhile."""
    new_bytes: int = 0
    seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    """Why which sample can't be encoded."""
    skipped: list[str] = field(default_factory=list)
    """Everything that is left out, and why."""
    cut: int = 0
    """Prompts that were longer than allowed, and were cut."""


@dataclass(frozen=True)
class Listener:
    """Who wants to know how it goes."""

    estimate: Callable[[Estimate], None] = lambda estimate: None
    forecast: Callable[[str, float], None] = lambda kind, seconds: None
    """How long the entries of a kind will take, once a few of them are made."""
    progress: Callable[[int, int], None] = lambda done, total: None
    finished: Callable[[CacheReport], None] = lambda report: None
    """The account, also of a run that ends in an error about some samples."""


@dataclass(frozen=True)
class _Entry:
    """One entry to make: for which samples, and how to open what it is made from."""

    kind: str
    key: str
    size: tuple[int, ...]
    """Entries of one size may be encoded together."""
    tokens: int
    samples: list[Sample]
    open: Callable[[], Any]


class CacheFiller:
    """Fills the cache with the entries of some samples.

    Args:
        load: the encoder for entries of kind "text" or "image"; called when the first of a kind is due.
        token_bytes: bytes of a text token and of an image token, for the estimate.
        batch_size: entries of one size that are encoded at once.
        circumstances: settings that decide whether a sample fails, and that its key does not depend on.
    """

    def __init__(
        self,
        store: EmbeddingCacheManager,
        load: Callable[[str], Encoder],
        token_bytes: tuple[int, int],
        batch_size: int = 1,
        workers: int = 4,
        listener: Listener | None = None,
        circumstances: str = "",
    ) -> None:
        self._store = store
        self._load = load
        self._token_bytes = token_bytes
        self._batch_size = batch_size
        self._workers = workers
        self._listener = listener or Listener()
        self._circumstances = circumstances
        self._report = CacheReport()
        self._failed: dict[str, DataError] = {}
        self._done = 0

    def fill(self, samples: Sequence[Sample], text_tokens: int, claims: Claims, staging: Path) -> CacheReport:
        """Make what is missing. `text_tokens` is about how long a prompt is, for the estimate."""
        started = time.perf_counter()
        wanted = {entry for sample in samples for entry in keys_of(sample).entries}
        work = self._work(samples, text_tokens)
        if work:
            self._check_room(work)
        for kind in ("mask", "text", "image"):
            self._make([entry for entry in work if entry.kind == kind], kind, claims, staging, len(work))
        self._finish(samples, staging)
        report = self._report
        report.samples = len(samples) - len(report.failed)
        report.reused_entries = len(wanted) - report.new_entries - len(self._failed)
        report.seconds = time.perf_counter() - started
        return report

    def _work(self, samples: Sequence[Sample], text_tokens: int) -> list[_Entry]:
        """Every missing entry once, those of one size together."""
        work: dict[str, _Entry] = {}
        for sample in samples:
            missing = {key for _, key in self._store.missing_entries(keys_of(sample))}
            for entry in _recipes(sample, text_tokens):
                if entry.key in work:
                    work[entry.key].samples.append(sample)
                elif entry.key in missing:
                    work[entry.key] = entry
        return sorted(work.values(), key=lambda entry: (entry.kind, entry.size, entry.key))

    def _check_room(self, work: Sequence[_Entry]) -> None:
        text, image = self._token_bytes
        sizes = {"text": text, "image": image, "mask": 4}
        needed = sum(entry.tokens * sizes[entry.kind] + 400 for entry in work)
        counts = {kind: sum(entry.kind == kind for entry in work) for kind in sizes}
        folder = next(path for path in (self._store.root, *self._store.root.absolute().parents) if path.exists())
        estimate = Estimate(counts["text"], counts["image"], counts["mask"], needed, shutil.disk_usage(folder).free)
        self._listener.estimate(estimate)
        certain = sum(entry.tokens * image for entry in work if entry.kind == "image")
        problem = f"{folder} has {estimate.free / 1e9:.3g} GB free, and the cache needs"
        remedy = "free some space, or set cache.path to another disk."
        if certain > estimate.free:
            raise CacheError(f"{problem} at least {certain / 1e9:.3g} GB more", remedy)
        if estimate.bytes > estimate.free:
            logger.warning("%s about %.3g GB more; %s", problem, estimate.bytes / 1e9, remedy)

    def _make(self, work: list[_Entry], kind: str, claims: Claims, staging: Path, total: int) -> None:
        """All entries of one kind, first those nobody else is at, then those whose makers died."""
        if not work:
            return
        encoder: Encoder | None = None
        units_done, tokens, timed, started = 0, 0, 0, time.perf_counter()
        put_off: list[_Entry] = []
        # While waiting for another process this one must hold no claim, so nothing is read ahead then.
        for units, workers in (
            (self._claimed(work, claims, put_off), self._workers),
            (self._inherited(put_off, claims), 0),
        ):
            with closing(read_ahead(_open_all, units, workers, _names)) as opened:
                for unit in opened:
                    if encoder is None and kind != "mask":
                        encoder = self._load(kind)
                    for entry, content in self._encoded(unit, encoder):
                        self._store_one(entry, content, staging)
                        claims.release(entry.key)
                        self._done += 1
                        tokens += entry.tokens
                    self._listener.progress(self._done, total)
                    units_done += 1
                    if units_done == _TIMED:  # the first one also paid for what is done only once
                        started, timed = time.perf_counter(), tokens
                    if units_done == 2 * _TIMED:
                        pace = (time.perf_counter() - started) / (tokens - timed)
                        self._listener.forecast(kind, pace * (sum(entry.tokens for entry in work) - tokens))
        self._listener.progress(self._done, total)

    def _claimed(self, work: list[_Entry], claims: Claims, put_off: list[_Entry]) -> Iterator[list[_Entry]]:
        """Units of one size that this process has claimed. Processes begin at different places of the list."""
        units = list(_units(work, self._batch_size))
        launch = launched()
        start = len(units) * launch.rank // launch.world_size
        for unit in units[start:] + units[:start]:
            mine = []
            for entry in unit:
                if not claims.claim(entry.key):
                    put_off.append(entry)
                elif self._store.has(entry.kind, entry.key):  # made since the list of work was written
                    claims.release(entry.key)
                    self._done += 1
                else:
                    mine.append(entry)
            if mine:
                yield mine

    def _inherited(self, put_off: list[_Entry], claims: Claims) -> Iterator[list[_Entry]]:
        """Entries another process had claimed: wait for each; if it is not there then, its maker is gone."""
        if put_off:
            logger.warning("waiting for other processes to make %d entries", len(put_off))
        for entry in put_off:
            claims.claim(entry.key, wait=True)
            if self._store.has(entry.kind, entry.key):
                claims.release(entry.key)
                self._done += 1
            else:
                yield [entry]

    def _encoded(
        self, unit: list[tuple[_Entry, Any]], encoder: Encoder | None
    ) -> Iterator[tuple[_Entry, Mapping[str, Tensor] | DataError]]:
        """The tensors of every entry of a unit, or why there are none."""
        good = [(entry, opened) for entry, opened in unit if not isinstance(opened, DataError)]
        yield from ((entry, opened) for entry, opened in unit if isinstance(opened, DataError))
        if not good:
            return
        entries, contents = [entry for entry, _ in good], [opened for _, opened in good]
        if encoder is None:
            yield from ((entry, {"mask": mask}) for entry, mask in good)
        elif entries[0].kind == "image":
            latents = encoder.encode_images(contents)
            yield from ((entry, {"latents": item}) for entry, item in zip(entries, latents, strict=True))
        else:
            try:
                texts = encoder.encode_text(contents)
            except DataError as error:
                if len(good) == 1:
                    yield entries[0], error
                else:  # one of them is at fault: take them one by one
                    for pair in good:
                        yield from self._encoded([pair], encoder)
                return
            yield from ((entry, text_tensors(text)) for entry, text in zip(entries, texts, strict=True))

    def _store_one(self, entry: _Entry, content: Mapping[str, Tensor] | DataError, staging: Path) -> None:
        if isinstance(content, DataError):
            self._failed[entry.key] = content
            return
        self._report.new_bytes += self._store.write(entry.kind, entry.key, content, staging)
        self._report.new_entries += 1

    def _finish(self, samples: Sequence[Sample], staging: Path) -> None:
        """Manifests of complete samples, reasons for the others."""
        for sample in samples:
            failed = [(kind, self._failed[key]) for kind, key in keys_of(sample).entries if key in self._failed]
            if failed:
                kind, error = failed[0]
                # Samples may share a prompt, which does not know whose it is; an image's error has its path.
                name = f"{sample.name}: " if kind == "text" else ""
                self._store.fail(keys_of(sample), f"{name}{error.problem}", self._circumstances, staging)
                self._report.failed.append(f"{name}{error}")
                continue
            try:
                if self._store.manifest(keys_of(sample)) is None:
                    self._store.complete(keys_of(sample), staging)
            except CacheError as error:  # a damaged entry of an earlier run
                self._report.failed.append(f"{sample.name}: {error}")
        self._store.index.tidy(staging)


def _recipes(sample: Sample, text_tokens: int) -> Iterator[_Entry]:
    """Every entry of a sample and how to open what it is made from."""
    keys, images, shapes = keys_of(sample), sample.own_images, sample.shapes
    for variant, key in keys.texts:
        yield _Entry("text", key, (), text_tokens, [sample], partial(open_prompt, sample, variant))
    for image, key, shape in zip(images.all, keys.images, shapes.images, strict=True):
        tokens = image_tokens([shape])
        yield _Entry("image", key, image.transform.size, tokens, [sample], partial(open_image, image))
    if keys.mask:
        yield _Entry("mask", keys.mask, (), shapes.target_tokens, [sample], partial(open_mask, sample))


def _units(work: Sequence[_Entry], batch_size: int) -> Iterator[list[_Entry]]:
    """Entries of one size, so many at a time."""
    unit: list[_Entry] = []
    for entry in work:
        if unit and (len(unit) == batch_size or entry.size != unit[0].size):
            yield unit
            unit = []
        unit.append(entry)
    if unit:
        yield unit


def _open_all(unit: list[_Entry]) -> list[tuple[_Entry, Any]]:
    opened: list[tuple[_Entry, Any]] = []
    for entry in unit:
        try:
            opened.append((entry, entry.open()))
        except DataError as error:
            opened.append((entry, error))
    return opened


def _names(unit: list[_Entry]) -> str:
    return ", ".join(entry.samples[0].name for entry in unit)
