"""Looking after a cache folder: is everything in it what was written, what is it for, what can go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qflux.cache import tensor_file
from qflux.cache.cache import KINDS, EmbeddingCacheManager
from qflux.cache.keys import Manifest, SampleKeys
from qflux.cache.samples import keys_of, read_samples
from qflux.cache.tensor_file import BrokenEntry
from qflux.config import Config
from qflux.data.images.index import in_parallel
from qflux.files.locks import Claims
from qflux.models.family import Family

Progress = Callable[[int, int], None]


@dataclass
class Verification:
    """What `verify` found."""

    entries: int = 0
    samples: int = 0
    bytes: int = 0
    broken: dict[Path, str] = field(default_factory=dict)
    """Files that are not what was written, and why."""
    removed: int = 0


@dataclass(frozen=True)
class KindCount:
    """Entries of one kind."""

    files: int
    bytes: int


@dataclass(frozen=True)
class CacheStats:
    """What a cache folder holds."""

    samples: int
    kinds: dict[str, KindCount]
    failed: int
    unused: int
    """Entries that no sample in the folder refers to."""

    @property
    def bytes(self) -> int:
        return sum(kind.bytes for kind in self.kinds.values())


@dataclass(frozen=True)
class Collected:
    """What `gc` would remove, or removed."""

    samples: int
    """Samples that stay."""
    kept: int
    """Entries that stay."""
    files: list[Path]
    bytes: int


def verify(store: EmbeddingCacheManager, repair: bool = False, progress: Progress | None = None) -> Verification:
    """Check entries against their checksums and manifests against their entries; `repair` removes what is broken."""
    if not repair:
        return _verified(store, progress)
    claims = Claims(store.root)
    try:
        with claims.alone():
            found = _verified(store, progress)
            for path in found.broken:
                path.unlink(missing_ok=True)
                found.removed += 1
            return found
    finally:
        claims.close()


def _verified(store: EmbeddingCacheManager, progress: Progress | None) -> Verification:
    found = Verification()
    files = list(store.entry_files())
    manifests = list(store.manifests())
    for done, (path, size, fault) in enumerate(in_parallel(_check_entry, files), start=1):
        found.entries += 1
        found.bytes += size
        if fault:
            found.broken[path] = fault
        if progress:
            progress(done, len(files))
    whole = {path for _, path in files} - found.broken.keys()
    for path in manifests:
        found.samples += 1
        fault = _check_manifest(store, path, whole)
        if fault:
            found.broken[path] = fault
    return found


def _check_entry(item: tuple[str, Path]) -> tuple[Path, int, str | None]:
    kind, path = item
    try:
        size = path.stat().st_size
        name = f"{kind}/{path.stem}"
        if KINDS[kind] not in tensor_file.read(path, name):
            return path, size, f"it has no tensor {KINDS[kind]}"
        return path, size, None
    except (BrokenEntry, OSError) as error:
        return path, 0, str(error)


def _check_manifest(store: EmbeddingCacheManager, path: Path, whole: Collection[Path]) -> str | None:
    try:
        manifest = Manifest.parse(path.stem, path.read_text())
    except (OSError, ValueError) as error:
        return str(error)
    for kind, key in manifest.keys.entries:
        entry = store.entry_path(kind, key)
        if entry not in whole:
            return f"its entry {kind}/{key} is {'damaged' if entry.exists() else 'missing'}"
        if entry.stat().st_size != manifest.sizes[key]:
            return f"its entry {kind}/{key} has another size than it says"
    return None


def stats(store: EmbeddingCacheManager) -> CacheStats:
    """Counts and sizes."""
    files: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for kind, path in store.entry_files():
        files[kind].append(path)
    used, samples = set(), 0
    for path in store.manifests():
        samples += 1
        used |= _entries_of(store, path)
    return CacheStats(
        samples=samples,
        kinds={k: KindCount(len(paths), sum(path.stat().st_size for path in paths)) for k, paths in files.items()},
        failed=len(list((store.root / "failed").glob("*.json"))),
        unused=sum(path not in used for paths in files.values() for path in paths),
    )


def collect_unused(
    store: EmbeddingCacheManager, configs: Sequence[tuple[Config, Family]], dry_run: bool = False
) -> Collected:
    """Remove what the data of none of these configs needs, while nobody fills the cache."""
    datasets = [read_samples(config, family, store) for config, family in configs]
    samples = [keys_of(sample) for dataset in datasets for sample in dataset.from_images]
    stored = [s.embeddings.key for dataset in datasets for s in dataset.all if s.images is None and s.embeddings]
    claims = Claims(store.root)
    try:
        with claims.alone():
            return collect(store, samples, stored, dry_run)
    finally:
        claims.close()


def collect(
    store: EmbeddingCacheManager, samples: Collection[SampleKeys], stored: Collection[str], dry_run: bool
) -> Collected:
    """Remove every sample that is neither among `samples` nor, by key, `stored`, and entries that no sample needs.

    An entry that a wanted sample needs stays even if the sample is not complete yet.
    """
    wanted = {keys.key for keys in samples} | set(stored)
    kept = {store.entry_path(kind, key) for keys in samples for kind, key in keys.entries}
    doomed: list[Path] = []
    for path in store.manifests():
        if path.stem in wanted:
            kept |= _entries_of(store, path)
        else:
            doomed.append(path)
    doomed += [path for path in sorted((store.root / "failed").glob("*.json")) if path.stem not in wanted]
    doomed += [path for _, path in store.entry_files() if path not in kept]
    size = sum(path.stat().st_size for path in doomed)
    if not dry_run:
        for path in doomed:  # manifests first: an interruption leaves entries without a sample, never the reverse
            path.unlink(missing_ok=True)
    return Collected(len(samples) + len(stored), sum(path.exists() for path in kept), doomed, size)


def _entries_of(store: EmbeddingCacheManager, manifest: Path) -> set[Path]:
    try:
        keys = Manifest.parse(manifest.stem, manifest.read_text()).keys
    except (OSError, ValueError):
        return set()
    return {store.entry_path(kind, key) for kind, key in keys.entries}
