"""Where the embeddings of a sample belong: keys of its entries, and the manifest that says it is complete.

An entry's key is a hash of the source's bytes, the transform, the encoder and the dtype, and of nothing else. Changing
one of them is a miss; there is no such thing as a stale entry.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from qflux.cache.tensor_file import VERSION
from qflux.data.encoded import Variant
from qflux.data.sample import Sample
from qflux.files.hashing import key_of
from qflux.ragged.shapes import Shapes


@dataclass(frozen=True)
class Projected:
    """Text was put through a layer of the transformer before it was kept."""

    layer: str
    """What the layer's weights are known by."""
    sample: str
    """The key that the sample would have without that."""


@dataclass(frozen=True)
class SampleKeys:
    """Where the parts of one sample lie in the cache."""

    id: str
    """Of the sample itself, from its content: independent of paths, transforms and encoders."""
    texts: tuple[tuple[Variant, str], ...]
    """The prompt as it is, first, and as dropout leaves it; its other wordings likewise."""
    target: str
    controls: tuple[str, ...]
    shapes: Shapes
    mask: str | None
    projected: Projected | None = None

    @property
    def identity(self) -> str:
        """What the sample is known by in a run, whether its text is projected in the cache or later."""
        return self.projected.sample if self.projected else self.key

    @property
    def images(self) -> tuple[str, ...]:
        """Target and controls, in the order of their tokens."""
        return (self.target, *self.controls)

    @property
    def key(self) -> str:
        """Of the sample as a whole, with all its captions; what dropout leaves of it does not matter."""
        captions = sorted((variant.number, key) for variant, key in self.texts if variant.caption and variant.controls)
        text: object = captions[0][1] if len(captions) == 1 else [key for _, key in captions]
        return key_of("sample", VERSION, text, self.images, self.mask)

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(variant for variant, _ in self.texts)

    @property
    def entries(self) -> list[tuple[str, str]]:
        """Kind and key of every entry, each once."""
        mask = [("mask", self.mask)] if self.mask else []
        listed = [*(("text", key) for _, key in self.texts), *(("image", key) for key in self.images), *mask]
        return list(dict.fromkeys(listed))


@dataclass(frozen=True)
class Manifest:
    """A sample as the cache describes it."""

    keys: SampleKeys
    lengths: tuple[int, ...]
    """Tokens of each of its texts."""
    sizes: dict[str, int]
    """Bytes of each entry, by key."""
    is_cut: bool
    """The prompt was longer than allowed."""

    @property
    def text_tokens(self) -> int:
        """Of the prompt as it is; of several captions, the longest."""
        texts = zip(self.keys.texts, self.lengths, strict=True)
        return max(tokens for (variant, _), tokens in texts if variant.caption and variant.controls)

    def dump(self) -> dict[str, Any]:
        keys = self.keys
        texts = zip(keys.texts, self.lengths, strict=True)
        return {
            "version": VERSION,
            "id": keys.id,
            "texts": [[_listed(variant), key, tokens] for (variant, key), tokens in texts],
            "images": list(keys.images),
            "img_shapes": [list(shape) for shape in keys.shapes.images],
            "n_controls": len(keys.controls),
            "mask": keys.mask,
            "sizes": self.sizes,
            "is_cut": self.is_cut,
        } | ({"projected": asdict(keys.projected)} if keys.projected else {})

    def sealed(self) -> dict[str, Any]:
        """With a checksum, as it is written."""
        return self.dump() | {"checksum": key_of(self.dump())}

    @classmethod
    def parse(cls, key: str, text: str) -> Manifest:
        """A `ValueError` if this is no manifest of a sample with this key."""
        try:
            values = json.loads(text)
            if values["version"] != VERSION:
                raise ValueError(f"its version is {values['version']!r}, not {VERSION!r}")
            target, *controls = values["images"]
            grid, *others = ((int(f), int(h), int(w)) for f, h, w in values["img_shapes"])
            keys = SampleKeys(
                id=values["id"],
                texts=tuple((Variant(*variant), text_key) for variant, text_key, _ in values["texts"]),
                target=target,
                controls=tuple(controls),
                shapes=Shapes((grid,), tuple(others)),
                mask=values["mask"],
                projected=Projected(**values["projected"]) if "projected" in values else None,
            )
            manifest = cls(
                keys,
                lengths=tuple(int(tokens) for _, _, tokens in values["texts"]),
                sizes={name: int(size) for name, size in values["sizes"].items()},
                is_cut=bool(values["is_cut"]),
            )
            if values["checksum"] != key_of(manifest.dump()):
                raise ValueError("its contents do not fit its checksum")
            if keys.key != key or {k for _, k in keys.entries} != manifest.sizes.keys():
                raise ValueError("it describes another sample")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no manifest: {error!r}") from None
        return manifest


def _listed(variant: Variant) -> list[object]:
    """A variant as manifests have it, which had no numbers before samples could have several captions."""
    return [variant.caption, variant.controls, *([variant.number] if variant.number else [])]


@dataclass(frozen=True)
class KeyMaker:
    """The cache keys of a sample: everything its entries are made from, and nothing else."""

    family: str
    dtype: str
    text_limit: int
    text_encoder: str
    """What the text encoders are known by."""
    image_encoder: str
    projection: str | None = None
    """What the layer is known by that text is put through; none keeps it as it was encoded."""

    def __call__(self, sample: Sample, variants: Sequence[Variant]) -> SampleKeys:
        images = sample.own_images
        variants = [one for variant in variants for one in variant.of_captions(len(sample.captions))]
        target, *controls = (
            key_of("image", VERSION, image.facts.hash, image.transform.key, self.image_encoder, self.dtype)
            for image in images.all
        )
        masked = images.mask_hash and key_of("mask", VERSION, images.mask_hash, images.target.transform.key)
        keys = SampleKeys(
            id=sample.id,
            texts=tuple((variant, self._text(sample, variant, self.text_encoder)) for variant in variants),
            target=target,
            controls=tuple(controls),
            shapes=sample.shapes,
            mask=masked or None,
        )
        if self.projection is None:
            return keys
        encoder = key_of(self.text_encoder, self.projection)
        texts = tuple((variant, self._text(sample, variant, encoder)) for variant in variants)
        return replace(keys, texts=texts, projected=Projected(self.projection, keys.key))

    def _text(self, sample: Sample, variant: Variant, encoder: str) -> str:
        controls = sample.own_images.controls if variant.controls else ()
        seen = [(image.facts.hash, image.view.key) for image in controls if image.view]
        # Until 0.1.0 the limit counted the tokens of images too, and long prompts with images were cut differently.
        limit = [self.text_limit, "words"] if seen else self.text_limit
        text: object = sample.captions[variant.number] if variant.caption else ""
        if variant.caption and sample.prompt_2 is not None:
            text = [text, sample.prompt_2]
        prompt = (self.family, text, seen, limit)
        return key_of("text", VERSION, prompt, encoder, self.dtype)
