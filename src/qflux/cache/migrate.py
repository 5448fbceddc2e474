"""`qflux cache migrate`: torch files of format 1.0 or 2.0, and other caches, into a new folder of today's format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from qflux.cache import tensor_file
from qflux.cache.cache import EmbeddingCacheManager, text_tensors
from qflux.cache.keys import SampleKeys
from qflux.cache.stored import StoredEmbeddings, read_stored
from qflux.config import CacheSource
from qflux.data.encoded import COMPLETE, TextEmbedding, Variant
from qflux.data.sample import Sample
from qflux.errors import CacheError, DataError
from qflux.files.hashing import key_of
from qflux.files.locks import Claims


@dataclass
class Migration:
    """What `migrate` did."""

    samples: int = 0
    new_entries: int = 0
    bytes: int = 0
    failed: list[str] = field(default_factory=list)


def migrate(source: CacheSource, target: Path, progress: Callable[[int, int], None] | None = None) -> Migration:
    """Rewrite the samples of a folder. The old one is only read; run again, it goes on where it was."""
    if target.resolve() == source.path.resolve() or source.path.resolve() in target.resolve().parents:
        raise DataError(f"the new cache {target} lies in the old one {source.path}", "give another folder.")
    samples, listing = read_stored(source)
    result = Migration(failed=[f"{fault}\n    → {fault.remedy}" for fault in listing.faults])
    store, claims = EmbeddingCacheManager(target), Claims(target)
    try:
        with claims.sharing() as staging:
            for done, sample in enumerate(samples, start=1):
                try:
                    _rewrite(sample, store, staging, result)
                except CacheError as error:
                    result.failed.append(str(error))
                if progress:
                    progress(done, len(samples))
    finally:
        claims.close()
    return result


def _rewrite(sample: Sample, store: EmbeddingCacheManager, staging: Path, result: Migration) -> None:
    embeddings = sample.embeddings
    assert isinstance(embeddings, StoredEmbeddings)
    encoded = embeddings.load(COMPLETE)
    texts: dict[Variant, TextEmbedding] = {variant: embeddings.load(variant).text for variant in embeddings.variants}

    def put(kind: str, tensors: dict[str, Tensor]) -> str:
        """Write an entry under a key made from its contents; equal ones are written once."""
        key = key_of("migrated", kind, tensor_file.digest(tensors))
        if not store.has(kind, key):
            result.bytes += store.write(kind, key, tensors, staging)
            result.new_entries += 1
        return key

    keys = SampleKeys(
        id=sample.id,
        texts=tuple((variant, put("text", text_tensors(text))) for variant, text in texts.items()),
        target=put("image", {"latents": encoded.target}),
        controls=tuple(put("image", {"latents": latents}) for latents in encoded.controls),
        shapes=encoded.shapes,
        mask=None if encoded.mask is None else put("mask", {"mask": encoded.mask}),
    )
    if store.manifest(keys) is None:
        store.complete(keys, staging)
    result.samples += 1
